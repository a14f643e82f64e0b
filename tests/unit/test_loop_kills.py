"""The part of `make bench-publish` that kills the loop, on a log that is filled without an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import tiny_models
from fakes.recorded_log import play_group
from fakes.row_publisher import publishing

from lightning_rl.store.database import Database

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from publish.loop_kills import _Log, play

pytestmark = pytest.mark.slow


class StoreFeed:
    """Plays a tiny model by itself and writes to the log."""

    def __init__(self, database: Database) -> None:
        self._database, self._model = database, tiny_models.qwen3()

    def play(self, number: int, rewards: list[float]) -> list[str]:
        return play_group(self._database, self._model, f"t{number}", rewards, tokens=(2,))


def test_the_loop_is_killed_and_trains_every_choice_once(tmp_path: Path) -> None:
    model = tiny_models.save(tmp_path / "model", tiny_models.qwen3())
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    with publishing(database.url) as published:
        found = play(database.url, model, StoreFeed(database), tmp_path, kills=2, seed=3)
    assert (found.kills, found.duplicates, found.gaps, found.strays, found.runs) == (2, 0, 0, 0, 1)
    assert found.is_met
    assert found.versions == len(published) > 1
    assert found.choices == sum(_Log(database).trained().values()) > 0

    # what is trained twice is counted
    step = "run_id, 99, policy, from_version, created_at_ms, trained_at_ms FROM step_manifests WHERE step = 0"
    choices = "run_id, 99, call_id, choice_index, episode_id, advantage, multiplier FROM manifest_choices"
    with database.write() as conn:
        names = "run_id, step, policy, from_version, created_at_ms, trained_at_ms"
        conn.execute(sa.text(f"INSERT INTO step_manifests ({names}) SELECT {step}"))
        names = "run_id, step, call_id, choice_index, episode_id, advantage, multiplier"
        conn.execute(sa.text(f"INSERT INTO manifest_choices ({names}) SELECT {choices}"))
    assert sum(count > 1 for count in _Log(database).trained().values()) == found.choices
    database.close()
