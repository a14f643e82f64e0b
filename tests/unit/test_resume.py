"""Runs that die at each of their writes go on as if they had not; and which runs must not go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import tiny_models
from fakes.killed_runs import POINTS, Died, assert_same_end, die, dying
from fakes.recorded_log import play_group

from lightning_rl.settings import ResumeSettings, TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.report import STEP_LOG

GROUPS = 4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.qwen3())


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Groups of one step each; the third trains nothing."""
    database = Database.open(f"sqlite:///{tmp_path_factory.mktemp('log') / 'log.db'}")
    for i in range(GROUPS):
        play_group(database, tiny_models.qwen3(), f"t{i}", [1.0, 1.0] if i == 2 else [1.0, 0.0])
    yield database
    database.close()


KINDS = {
    "full": {"weights": "full", "epochs": 2, "lr_schedule": "linear", "max_steps": GROUPS - 1},
    "lora": {"weights": "lora", "lora_rank": 4},
    "critic": {"weights": "lora", "lora_rank": 4, "credit": "step_gae", "critic_learning_rate": 1e-2},
}


def settings(log: Database, model: Path, **changes) -> TrainSettings:
    defaults = {
        "db": log.url,
        "model": model,
        "output": Path(log.url.removeprefix("sqlite:///")).parent / "runs",
        "weights": "full",
        "learning_rate": 1e-3,
        "groups_per_step": 1,
        "publish": False,
        "progress": False,
    }
    return TrainSettings.load(None, **{**defaults, **changes})


def resume(log: Database, run: str = "latest", **changes):
    return train(ResumeSettings.load(None, db=log.url, **changes), resume=run)


@pytest.fixture(scope="module")
def references(log, model_folder):
    """The same runs, uninterrupted; made when they are first asked for."""
    made = {}

    def reference(kind: str) -> Path:
        if kind not in made:
            made[kind] = train(settings(log, model_folder, **KINDS[kind])).folder
        return made[kind]

    return reference


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_dies_at_any_write_goes_on_exactly(log, model_folder, references, monkeypatch, point):
    reference = references("full")
    with monkeypatch.context() as patch:
        dying(point, 2, die, patch.setattr)
        with pytest.raises(Died):
            train(settings(log, model_folder, **KINDS["full"]))
    summary = resume(log)
    assert (summary.status, summary.steps_trained) == ("finished", GROUPS - 1)
    assert_same_end(summary.folder, reference)
    assert trained_once(log, summary.run_id)
    steps = [json.loads(line)["step"] for line in (summary.folder / STEP_LOG).read_text().splitlines()]
    assert steps == list(range(GROUPS))


def trained_once(log: Database, run: str) -> bool:
    """Every choice of the log is in the run's manifests, once, and every manifest was trained."""
    with log.read() as conn:
        rows = conn.execute(
            sa.text("SELECT call_id, choice_index FROM manifest_choices WHERE run_id = :run"), {"run": run}
        ).all()
        everything = conn.execute(sa.text('SELECT call_id, "index" FROM choices')).all()
        untrained = sa.text(
            "SELECT count(*) FROM step_manifests WHERE run_id = :run AND trained_at_ms IS NULL"
        )
        assert conn.execute(untrained, {"run": run}).scalar() == 0
    return sorted(map(tuple, rows)) == sorted(map(tuple, everything))
