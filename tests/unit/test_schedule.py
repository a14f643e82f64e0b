"""The learning rate counts optimizer steps over whole groups: every epoch is one, an empty step is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.recorded_log import play_group

from lightning_rl.errors import SettingsError
from lightning_rl.settings.train import DryRunSettings, TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.planning.planner import plan_settings
from lightning_rl.trainer.report import STEP_LOG
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.schedule import Schedule
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer


def rates(schedule: Schedule, num: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = schedule.scheduler(optimizer)
    found = []
    for _ in range(num):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [2.0, 2.0, 2.0, 2.0]),
        (Schedule("constant", 3), [0.5, 1.0, 1.5, 2.0, 2.0]),
        (Schedule("linear", 0, 4), [2.0, 1.5, 1.0, 0.5, 0.0]),
        (Schedule("linear", 1, 5), [1.0, 2.0, 1.5, 1.0, 0.5]),
        (Schedule("cosine", 0, 4), [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]),
    ],
)
def test_rates_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_micro_batches_are_no_steps(tmp_path: Path) -> None:
    settings = BridgeSettings(
        output=tmp_path,
        learning_rate=1e-3,
        objective=Objective(),
        max_grad_norm=1.0,
        seed=0,
        on_gpu=False,
        bfloat16=False,
        schedule=Schedule("linear", 0, 4),
    )
    trainer = RecordedTrainer(tiny_models.llama(), tiny_models.tokenizer(), settings)
    made = [transition(f"c{i}", [3, i, 5], [6, 7], advantage=1.0 - i) for i in range(4, 10)]
    found = []

    def steps() -> Any:
        for max_tokens in (4096, 4, 8):  # one, six and three micro-batches
            batches = tree_batches(made, max_tokens)
            yield batches
            found.append((len(batches), trainer.metrics.learning_rate))

    trainer.steps = steps()
    trainer.train()
    assert found == [(1, 1e-3), (6, 7.5e-4), (3, 5e-4)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


def test_epochs_count_and_empty_steps_do_not(tmp_path: Path, model_folder: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for name, rewards in (("a", [1.0, 0.0]), ("same", [1.0, 1.0]), ("b", [1.0, 0.0]), ("c", [0.0, 1.0])):
        play_group(database, tiny_models.qwen3(), name, rewards)
    settings = TrainSettings.load(
        None,
        db=database.url,
        model=model_folder,
        output=tmp_path / "runs",
        weights="full",
        learning_rate=6e-4,
        lr_schedule="linear",
        groups_per_step=1,
        max_steps=3,
        epochs=2,
        publish=False,
        progress=False,
    )
    summary = train(settings)
    database.close()
    lines = [json.loads(line) for line in (summary.folder / STEP_LOG).read_text().splitlines()]
    # six optimizer steps: 6, 5 | nothing | 4, 3 | 2, 1
    assert [line["lr"] for line in lines] == pytest.approx([6e-4, None, 4e-4, 2e-4])


def test_a_schedule_that_falls_has_to_know_where_it_ends() -> None:
    for name in ("linear", "cosine"):
        with pytest.raises(SettingsError, match=f"lr_schedule = {name} .*--max-steps") as caught:
            plan_settings(DryRunSettings.load(None, lr_schedule=name, watch=True))
        assert "\n" not in str(caught.value)
        plan_settings(DryRunSettings.load(None, lr_schedule=name, watch=True, max_steps=10))
    plan_settings(DryRunSettings.load(None, watch=True, warmup_steps=5))
