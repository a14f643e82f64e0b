"""PPO: values before a step is planned, a critic that learns from it, and what SR-PPO makes of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import tiny_models
from fakes.episodes import judged, played
from fakes.recorded_log import play_group
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.errors import UserError
from lightning_rl.settings.train import TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.runs import load_manifest
from lightning_rl.trainer.credit.base import CreditContext, JudgedGroup
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.credit.sr_ppo import SrPpoOptions, changes, targets_of_group
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.reasons import Reason
from lightning_rl.trainer.report import STEP_LOG, StepLine, human


def advantages(setting: str, group: JudgedGroup, values: dict[str, float]) -> dict[str, float | None]:
    found = configure(setting).assign([group], CreditContext(values=values))
    return {call: credit.advantage for (call, _), credit in found.items()}


def test_sr_ppo_by_hand() -> None:
    group = JudgedGroup("g", "t", (played("a", 1.0, "xyz"),))
    values = {"a-c0": 0.2, "a-c1": 0.5, "a-c2": 0.4}
    assert advantages("sr_ppo", group, values) == pytest.approx({"a-c0": 0.3, "a-c1": -0.1, "a-c2": 0.6})
    # Pass@2: 1 - 0.8^2 = 0.36, 1 - 0.5^2 = 0.75, 1 - 0.6^2 = 0.64
    twice = advantages("sr_ppo n=2", group, values)
    assert twice == pytest.approx({"a-c0": 0.39, "a-c1": -0.11, "a-c2": 0.36})


def test_sr_ppo_passes_through_what_has_no_value() -> None:
    group = JudgedGroup("g", "t", (played("a", 0.0, "xyz"),))
    found = configure("sr_ppo").assign([group], CreditContext(values={"a-c0": 0.2, "a-c2": 0.4}))
    assert found["a-c0", 0].advantage == pytest.approx(0.2)
    assert (found["a-c1", 0].advantage, found["a-c1", 0].reason) == (None, Reason.NO_VALUE)
    assert found["a-c2", 0].advantage == pytest.approx(-0.4)


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1), st.integers(1, 8))
def test_an_episodes_changes_add_up_to_its_surprise(
    values: list[float | None], outcome: float, n: int
) -> None:
    known = [value for value in values if value is not None]
    found = [change for change in changes(values, outcome, n) if change is not None]
    assert len(found) == len(known)
    if known:
        assert sum(found) == pytest.approx(outcome - (1 - (1 - known[0]) ** n), abs=1e-9)


def test_sr_ppo_teaches_the_outcome() -> None:
    group = JudgedGroup(
        "g", "t", (played("a", 1.0, "xy"), played("b", 0.0), played("c", 1.0, set_aside="failed"))
    )
    values = {"a-c0": 0.2, "b-c0": 0.3, "c-c0": 0.1}
    assert targets_of_group(group, SrPpoOptions(), values) == {"a-c0": 1.0, "b-c0": 0.0}


def test_sr_ppo_takes_probabilities_alone() -> None:
    group = JudgedGroup("g", "t", (played("a", 1.0),))
    with pytest.raises(UserError, match=r'critic said 1\.5: set critic_loss = "bce"'):
        advantages("sr_ppo", group, {"a-c0": 1.5})
    with pytest.raises(UserError, match="outcomes between 0 and 1, and episode a has 2"):
        advantages("sr_ppo", JudgedGroup("g", "t", (played("a", 2.0),)), {"a-c0": 0.5})
    with pytest.raises(UserError, match="this run has no critic"):
        advantages("sr_ppo", judged([1.0, 0.0]), {})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture
def log(tmp_path: Path):
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    yield database
    database.close()


def settings(log: Database, model: Path, **changes: object) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-2,
        "groups_per_step": 2,
        "credit": "step_gae",
        "publish": False,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / STEP_LOG).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_ppo_run(log: Database, model_folder: Path, weights: str) -> None:
    for i in range(4):
        play_group(log, tiny_models.qwen3(), f"t{i}", [1.0, 0.0, 0.0, 1.0])
    summary = train(settings(log, model_folder, weights=weights))
    first, second = lines(summary.folder)
    assert summary.steps_trained == 2
    assert first["gap_max"] < 1e-4  # the critic has not touched the policy
    assert first["value_mean"] == 0.0  # it knew nothing yet
    assert first["explained_variance"] == pytest.approx(0.0, abs=0.05)
    assert second["value_mean"] != 0.0
    assert second["critic_loss"] > 0
    with log.read() as conn:
        manifest = load_manifest(conn, summary.run_id, 0)
    by_call = {row.call_id: row.advantage for row in manifest.choices}
    # V = 0, gamma 0.99, lam 0.9: B is 1 and 0.891 in good episodes, 0 in bad ones; whitened over 16 calls
    good = [by_call["t0-b-0-0"], by_call["t0-b-0-1"], by_call["t0-b-1-0"]]
    numbers = torch.tensor([0.891, 1.0, 0.0, 0.0] * 4)
    middle, scale = numbers.mean(), numbers.std()
    assert good == pytest.approx([float((b - middle) / scale) for b in (0.891, 1.0, 0.0)], rel=1e-5)


def test_groups_without_variance_teach_too(log: Database, model_folder: Path) -> None:
    play_group(log, tiny_models.qwen3(), "t0", [1.0, 1.0], tokens=(2,))
    summary = train(settings(log, model_folder))
    (line,) = lines(summary.folder)
    assert (line["choices_trained"], line["critic_loss"]) == (0, pytest.approx(0.5))
    assert line["episodes_excluded"] == {"no_variance:equal_advantages": 2}


@pytest.mark.parametrize("rewards", [[1e100, -1e100], [1e100, 1e100]])
def test_a_critic_that_is_not_finite_is_not_saved(log: Database, model_folder: Path, rewards: list) -> None:
    play_group(log, tiny_models.qwen3(), "t0", rewards)
    chosen = settings(log, model_folder, max_steps=1)
    with pytest.raises(UserError, match="critic's loss or gradient of step 0 is not finite, so nothing"):
        train(chosen)
    (folder,) = chosen.output.iterdir()
    assert not list(folder.rglob("critic.pt"))
    assert not list(folder.rglob("state.pt"))
    assert not list((folder / "versions").iterdir())


def test_warm_up_teaches_the_critic_alone(log: Database, model_folder: Path) -> None:
    for i in range(4):
        play_group(log, tiny_models.qwen3(), f"t{i}", [1.0, 0.0])
    summary = train(settings(log, model_folder, critic_warmup_steps=1))
    first, second = lines(summary.folder)
    assert (first["to_version"], first["choices_trained"]) == (None, 0)
    assert first["choices_excluded"] == {"critic_warm_up": 8}
    assert first["episodes_excluded"] == {"critic_warm_up": 4}
    assert first["critic_loss"] > 0
    assert (second["to_version"], second["choices_trained"]) == (1, 8)
    assert second["value_mean"] != 0.0
    with log.read() as conn:
        manifest = load_manifest(conn, summary.run_id, 0)
    assert {(row.advantage, row.multiplier, row.reason) for row in manifest.choices} == {
        (None, 0.0, "critic_warm_up")
    }


def test_sr_ppo_trains_tasks_that_are_played_once(log: Database, model_folder: Path) -> None:
    for i in range(4):
        play_group(log, tiny_models.qwen3(), f"t{i}", [float(i % 2)])
    summary = train(settings(log, model_folder, credit="sr_ppo", critic_loss="bce", groups_per_step=4))
    (line,) = lines(summary.folder)
    assert (line["episodes_trained"], line["value_mean"]) == (4, 0.5)
    with log.read() as conn:
        manifest = load_manifest(conn, summary.run_id, 0)
    by_call = {row.call_id: row.advantage for row in manifest.choices}
    assert by_call["t1-b-0-1"] == pytest.approx(0.5)  # success, and nobody knew
    assert by_call["t0-b-0-1"] == pytest.approx(-0.5)
    assert by_call["t1-b-0-0"] == pytest.approx(0.0)


def test_people_read_what_the_critic_explains() -> None:
    counts = dict.fromkeys(("groups", "groups_trained", "episodes", "episodes_trained", "choices"), 0)
    line = StepLine(
        step=0,
        from_version=0,
        to_version=1,
        reward_mean=0.5,
        episodes_excluded={},
        choices_trained=1,
        choices_excluded={},
        trained_tokens=1,
        critic_loss=0.25,
        explained_variance=0.5,
        **counts,
    )
    assert "critic 0.25, explains 0.50" in human(line)
