"""A log that is pruned between a run's interruption and its resumption."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import tiny_models
from fakes.killed_runs import dying
from fakes.recorded_log import play_group

from lightning_rl.records import now_ms
from lightning_rl.settings.train import ResumeSettings, TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.store.prune import RESUMABLE, Selection, prune
from lightning_rl.trainer.loop import train


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_goes_on_with_its_step_though_the_log_was_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.save(tmp_path / "model", tiny_models.qwen3())
    log = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for number in range(2):
        play_group(log, tiny_models.qwen3(), f"t{number}", [1.0, 0.0])
    settings = TrainSettings.load(
        None,
        db=log.url,
        model=model,
        output=tmp_path / "runs",
        weights="full",
        groups_per_step=1,
        publish=False,
        progress=False,
    )
    with monkeypatch.context() as patch:
        dying("in the step", 2, interrupt, patch.setattr)
        stopped = train(settings)
    assert (stopped.status, stopped.steps_trained) == ("stopped", 1)
    done = prune(log, Selection(before_ms=now_ms() + 60_000))
    assert dict(done.left_out) == {RESUMABLE: 2}
    assert done.rows["episodes"] == 2, "those of the finished step"
    summary = train(ResumeSettings.load(None, db=log.url), resume=stopped.run_id)
    assert (summary.status, summary.steps_trained) == ("finished", 2)
    assert prune(log, Selection(before_ms=now_ms() + 60_000)).rows["episodes"] == 2
    with log.read() as conn:
        assert conn.execute(sa.text("SELECT count(*) FROM step_manifests")).scalar() == 2
    log.close()
