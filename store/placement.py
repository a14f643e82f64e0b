"""Where a new call belongs: its episode, its ordinal in it, and the episode's group.

The first call that names an episode creates it; later calls fill in what is still empty. What contradicts the
episode is kept with the call (`attribution_conflict`) and changes nothing: the episode's first word stands.
Tags are the call's own (`calls.tags`); the episode takes over those whose key it does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import sqlalchemy as sa

from ..records import CallIntent, EpisodeStatus, Purpose
from .events import add_event
from .schema import episodes, groups
from .statements import (
    insert_missing,
    insert_or_update,
    json_value,
    names_in,
    optional_text,
    rows_in,
    storable_json,
    storable_text,
)


def group_id(task_id: str, batch: str | None) -> str:
    """The same on every machine: a hash of task and batch ("" where nobody named one)."""
    return blake2b(f"{task_id}\x00{batch or ''}".encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class EpisodeRow:
    """An episode as it stands, with its group's batch; changed in memory first, written once."""

    id: str
    task_id: str | None = None
    group_id: str | None = None
    batch: str | None = None  # None: no group
    purpose: str = Purpose.TRAIN.value
    status: str = EpisodeStatus.RUNNING.value
    tags: dict[str, str] = field(default_factory=dict)
    num_calls: int = 0
    policy: str | None = None
    policy_version: int | None = None
    created_at_ms: int = 0
    last_call_at_ms: int | None = None

    def adopt_group(self, task_id: str | None, batch: str | None) -> str | None:
        """Fill in task and batch where empty; the contradiction in words, or None."""
        if task_id is not None and self.task_id is not None and task_id != self.task_id:
            return f"task {task_id!r}, but the episode's task is {self.task_id!r}"
        if batch and self.batch and batch != self.batch:
            return f"batch {batch!r}, but the episode's batch is {self.batch!r}"
        task = self.task_id if task_id is None else task_id
        if task is not None and (self.group_id is None or (batch and not self.batch)):
            self.task_id, self.batch, self.group_id = task, batch or "", group_id(task, batch)
        return None


@dataclass(frozen=True, slots=True)
class Placement:
    episode_id: str | None
    ordinal: int | None
    conflict: str | None


@dataclass(slots=True)
class Placed:
    """The locked episodes of a batch. `place` gives a new call its place, `write` stores the changes."""

    rows: Mapping[str, EpisodeRow]
    group_ids: set[str]  # that are known to exist
    changed: set[str]
    num_late: int = 0  # calls on episodes that had ended

    def place(self, conn: sa.Connection, intent: CallIntent) -> Placement:
        at = intent.attribution
        if at.episode_id is None:
            return Placement(None, None, optional_text(at.conflict))
        row = self.rows[storable_text(at.episode_id)]
        conflicts = [at.conflict, row.adopt_group(optional_text(at.task_id), optional_text(at.batch))]
        said = "; ".join(storable_text(conflict) for conflict in conflicts if conflict) or None
        placement = Placement(row.id, row.num_calls, said)
        row.num_calls += 1
        row.tags = storable_json(at.tags) | row.tags
        if at.purpose is Purpose.EVAL:
            row.purpose = (
                at.purpose.value
            )  # never the other way: what was seen by an evaluation is not trained
        row.last_call_at_ms = max(row.last_call_at_ms or 0, intent.started_at_ms)
        if row.policy is None and intent.policy is not None:
            row.policy, row.policy_version = intent.policy, intent.policy_version
        if row.status != EpisodeStatus.RUNNING.value:
            add_event(conn, "episode", row.id, "late_call", {"call": intent.id}, "recorder")
            self.num_late += 1
        self.changed.add(row.id)
        return placement

    def write(self, conn: sa.Connection) -> None:
        rows = [self.rows[name] for name in sorted(self.changed)]
        # Only where another writer named the task between our first look and our lock.
        insert_groups(conn, [row for row in rows if row.group_id and row.group_id not in self.group_ids])
        write_rows(conn, rows)


def place_calls(conn: sa.Connection, intents: Sequence[CallIntent], activity: Mapping[str, int]) -> Placed:
    """Create what the intents name for the first time, lock their episodes and the active ones.

    `activity`: existing episode id -> time of its last answer in this batch.

    Groups before episodes before locks, each by key: see store/append.py on the order of locks.
    """
    named: dict[str, list[CallIntent]] = {}
    for intent in intents:
        if intent.attribution.episode_id is not None:
            named.setdefault(storable_text(intent.attribution.episode_id), []).append(intent)
    found = read_rows(conn, [*named, *activity])
    new: list[EpisodeRow] = []
    grouped: list[EpisodeRow] = []
    known = {row.group_id for row in found.values() if row.group_id is not None}
    for name, its in named.items():
        row = found.get(name)
        if row is None:
            row = EpisodeRow(name, created_at_ms=its[0].started_at_ms)
            new.append(row)
        for intent in its:
            row.adopt_group(
                optional_text(intent.attribution.task_id), optional_text(intent.attribution.batch)
            )
        if row.group_id is not None and row.group_id not in known:
            grouped.append(row)
    insert_groups(conn, grouped)
    if conn.dialect.name == "sqlite":
        rows = {row.id: row for row in (*found.values(), *new)}  # nobody else can write since our BEGIN
    else:
        insert_episodes(conn, {row.id: row.created_at_ms for row in new})
        rows = lock_rows(conn, [*named, *activity])
    for name, ended_at_ms in activity.items():
        rows[name].last_call_at_ms = max(rows[name].last_call_at_ms or 0, ended_at_ms)
    return Placed(rows, known | {str(row.group_id) for row in grouped}, set(activity))


def insert_groups(conn: sa.Connection, rows: Sequence[EpisodeRow]) -> None:
    """The groups of these episodes, where they are missing."""
    wanted = {
        row.group_id: {
            "id": row.group_id,
            "task_id": row.task_id,
            "batch": row.batch or "",
            "created_at_ms": row.created_at_ms,
        }
        for row in rows
    }
    insert_missing(conn, groups, wanted.values())


def insert_episodes(conn: sa.Connection, created_at_ms: Mapping[str, int]) -> None:
    """New running episodes by id, where they are missing."""
    insert_missing(
        conn,
        episodes,
        [
            {
                "id": name,
                "purpose": Purpose.TRAIN.value,
                "status": EpisodeStatus.RUNNING.value,
                "tags": {},
                "num_calls": 0,
                "has_gap": False,
                "created_at_ms": at,
            }
            for name, at in created_at_ms.items()
        ],
    )


def lock_rows(conn: sa.Connection, ids: Iterable[str]) -> dict[str, EpisodeRow]:
    """Those of the episodes that exist, theirs until the transaction ends."""
    return read_rows(conn, ids, lock=True)


def read_rows(conn: sa.Connection, ids: Iterable[str], *, lock: bool = False) -> dict[str, EpisodeRow]:
    """Those of the episodes that exist."""
    # On SQLite the transaction holds the write lock already, and the locking part compiles to nothing.
    found = [EpisodeRow(*row) for row in rows_in(conn, _READ_LOCKED if lock else _READ, ids)]
    for row in found:
        row.tags = json_value(row.tags)
    return {row.id: row for row in found}


def write_rows(conn: sa.Connection, rows: Sequence[EpisodeRow]) -> None:
    """Store what `EpisodeRow` holds of these episodes, new ones included."""
    insert_or_update(
        conn,
        episodes,
        [{name: getattr(row, name) for name in _STORED} | {"has_gap": False} for row in rows],
        _WRITTEN,
    )


_COLUMNS = [
    groups.c.batch if name == "batch" else episodes.c[name] for name in EpisodeRow.__dataclass_fields__
]
_READ = (
    sa.select(*_COLUMNS)
    .outerjoin(groups, groups.c.id == episodes.c.group_id)
    .where(names_in(episodes.c.id))
    .order_by(episodes.c.id)
)
_READ_LOCKED = _READ.with_for_update(key_share=True, of=episodes)
_WRITTEN = (
    "task_id",
    "group_id",
    "purpose",
    "tags",
    "num_calls",
    "policy",
    "policy_version",
    "last_call_at_ms",
)
_STORED = tuple(name for name in EpisodeRow.__dataclass_fields__ if name != "batch")
