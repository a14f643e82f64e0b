"""A million calls: what people and the trainer ask for, how long it takes, what the database reads for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from fakes.query_plans import explaining

from lightning_rl.records import EpisodeStatus
from lightning_rl.store.database import Database
from lightning_rl.store.doctor import check_up
from lightning_rl.store.episode_view import load_view
from lightning_rl.store.listing import EpisodeFilter, list_episodes, list_unattributed
from lightning_rl.trainer.planning.source import GroupSource

REPEATS = 3
GROUPS_PER_STEP = 8
FILTERS = {
    "newest": EpisodeFilter(),
    "status": EpisodeFilter(status=EpisodeStatus.FAILED),
    "task": EpisodeFilter(task="task-000003"),
    "tag": EpisodeFilter(tags={"user": "13"}),
    "agent": EpisodeFilter(agent="writer"),
    "no such agent": EpisodeFilter(agent="nobody"),
    "unrewarded": EpisodeFilter(unrewarded=True),
    "everything rewarded": EpisodeFilter(unrewarded=True, status=EpisodeStatus.EXCLUDED, agent="planner"),
    "gaps": EpisodeFilter(with_gap=True),
    "late calls": EpisodeFilter(late_calls=True),
}


@dataclass(slots=True)
class Timed:
    """`first_ms`: with whatever happened to be in memory. `plans`: of each statement that was run."""

    name: str
    first_ms: float = 0.0
    times_ms: list[float] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    result: Any = None

    @property
    def ms(self) -> float:
        """The median of the runs after the first."""
        return statistics.median(self.times_ms or [self.first_ms])


def ask(database: Database) -> list[Timed]:
    """Every question, timed; then once more with the plans of its statements."""
    source = GroupSource(database, "policy", "next", GROUPS_PER_STEP)
    questions: dict[str, Callable[[], Any]] = {
        "show": lambda: _reading(database, lambda conn: load_view(conn, "episode-0000100")),
        "doctor": lambda: _reading(database, check_up),
        "load_step": lambda: next(source.ready()),
        "unattributed": lambda: _reading(database, list_unattributed),
    }
    for name, wanted in FILTERS.items():
        questions[f"list: {name}"] = lambda wanted=wanted: _reading(
            database, lambda conn: list_episodes(conn, wanted)
        )
    return [_timed(database, name, question) for name, question in questions.items()]


def _reading(database: Database, work: Callable[[sa.Connection], Any]) -> Any:
    with database.read() as conn:
        return work(conn)


def _timed(database: Database, name: str, question: Callable[[], Any]) -> Timed:
    found = Timed(name)
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        found.result = question()
        took_ms = 1000 * (time.perf_counter() - began)
        if repeat:
            found.times_ms.append(took_ms)
        else:
            found.first_ms = took_ms
    with explaining(database) as plans:
        question()
    found.plans = plans
    return found
