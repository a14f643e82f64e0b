"""`lightning db prune`: episodes deleted for good, with everything that was only theirs.

An episode goes with its calls, choices, rewards, events and keys in one transaction, some episodes at a time,
so that live writers wait for milliseconds. Token blocks that no other call refers to go with it; body parts
follow in a pass of their own (store/collect.py).

What stays: groups that have other episodes, policy versions, runs and their step manifests. A manifest holds
ids and numbers, no words and no tokens, and without it nobody could say what a version was trained from.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from ..errors import UnknownEpisodeError, UserError
from ..records import CallStatus, EpisodeStatus, now_ms
from .collect import collect_chains
from .curation import OPEN_CALL_HOLDS_MS
from .database import Database
from .schema import (
    calls,
    choices,
    episodes,
    events,
    groups,
    manifest_choices,
    manifest_episodes,
    metadata,
    rewards,
    runs,
    step_manifests,
)
from .sharing import collect
from .statements import chunks, existing, storable_text

CALLS_PER_LOCK = 200
"""Calls deleted in one transaction, unless one episode has more: writers wait some 50 ms for it."""

RUNNING = "a call of it is under way (one without an answer counts as cut off after an hour)"
NOT_ENDED = "it has not ended, so it has no age yet; end it, or delete it with --episode alone"
PLANNED = "a training step that has not run yet is to train it"
RESUMABLE = (
    "its policy's newest run, which was interrupted, trains it when it is resumed; begin another run, or "
    "delete it with --episode"
)

SILENT_RUN_MS = OPEN_CALL_HOLDS_MS
"""A run without a heartbeat for so long is not being trained: its process was killed."""

_PRUNE_KEY = 0x4C49_4748_5450  # names the Postgres advisory lock of a running prune or import

_KEPT = {table.name for table in (manifest_episodes, manifest_choices)}


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to go: all that is said must hold. An ended episode is as old as its last call or end."""

    before_ms: int | None = None
    episode_ids: tuple[str, ...] = ()
    policy: str | None = None  # that the episode began with
    before_version: int | None = None

    @property
    def is_empty(self) -> bool:
        return self == Selection()


@dataclass(slots=True)
class Pruned:
    """Rows by table, of what goes or has gone; episodes that were left out, by reason."""

    rows: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


def plan(database: Database, selection: Selection) -> Pruned:
    """What `prune` would delete now, shared blocks and parts aside."""
    found = Pruned()
    with database.read() as conn:
        _require_named(conn, selection)
        for names in _pages(conn, selection):
            going, left_out = _ready(conn, names, selection)
            found.left_out.update(left_out)
            found.rows.update(_count(conn, calls.c.episode_id, going))
            found.rows["episodes"] += len(going)
        for names in _pages(conn, selection, of_bin=True):
            found.rows.update(_count(conn, calls.c.id, names))
    return found


def prune(
    database: Database, selection: Selection, on_progress: Callable[[int], None] = lambda episodes: None
) -> Pruned:
    """Delete what is selected, and the token blocks that only it referred to."""
    done = Pruned()
    with database.read() as conn:
        _require_named(conn, selection)
        pages = list(_pages(conn, selection))
        bin_pages = list(_pages(conn, selection, of_bin=True))
    for page in pages:
        for names in _by_size(database, page):
            with database.write() as conn:
                collect(conn)
                _delete_episodes(conn, names, selection, done)
            on_progress(len(names))
    for page in bin_pages:
        for chunk in chunks(page, CALLS_PER_LOCK):
            with database.write() as conn:
                collect(conn)
                still = sa.select(calls.c.id).where(calls.c.id.in_(chunk), calls.c.episode_id.is_(None))
                still = still.order_by(calls.c.id).with_for_update()  # nobody assigns them meanwhile
                _delete_calls(conn, conn.execute(still).scalars().all(), done)
    return done


def _require_named(conn: sa.Connection, selection: Selection) -> None:
    missing = set(selection.episode_ids) - existing(conn, episodes.c.id, selection.episode_ids)
    if missing:
        raise UnknownEpisodeError(f"no episode {min(missing)!r} in the log; nothing was deleted")


def _pages(conn: sa.Connection, selection: Selection, *, of_bin: bool = False) -> Iterator[Sequence[str]]:
    """Ids of the selected episodes (or of the selected calls of the unattributed bin), in pages."""
    if selection.is_empty or (of_bin and selection.episode_ids):
        return
    where = _of_bin(selection) if of_bin else _of_episodes(selection)
    query = sa.select(calls.c.id if of_bin else episodes.c.id).where(*where)
    result = conn.execute(query, execution_options={"yield_per": 500})
    yield from result.scalars().partitions(500)


def _of_episodes(selection: Selection) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = []
    if selection.episode_ids:
        where.append(episodes.c.id.in_(storable_text(name) for name in selection.episode_ids))
    if selection.policy is not None:
        where.append(episodes.c.policy == selection.policy)
    if selection.before_version is not None:
        where.append(episodes.c.policy_version < selection.before_version)
    if selection.before_ms is not None:
        where.append(episodes.c.created_at_ms < selection.before_ms)
        for column in (episodes.c.last_call_at_ms, episodes.c.ended_at_ms):
            where.append(sa.or_(column.is_(None), column < selection.before_ms))
    return where


def _of_bin(selection: Selection) -> list[sa.ColumnElement[bool]]:
    where = [
        calls.c.episode_id.is_(None),
        sa.or_(
            calls.c.status != CallStatus.OPEN.value, calls.c.started_at_ms < now_ms() - OPEN_CALL_HOLDS_MS
        ),
    ]
    if selection.policy is not None:
        where.append(calls.c.policy == selection.policy)
    if selection.before_version is not None:
        where.append(calls.c.policy_version < selection.before_version)
    if selection.before_ms is not None:
        where.append(sa.func.coalesce(calls.c.ended_at_ms, calls.c.started_at_ms) < selection.before_ms)
    return where


def _ready(
    conn: sa.Connection, names: Sequence[str], selection: Selection
) -> tuple[list[str], dict[str, int]]:
    """Those that may go now, and how many may not, by reason."""
    since = now_ms() - OPEN_CALL_HOLDS_MS
    under_way = sa.select(calls.c.episode_id).where(
        calls.c.episode_id.in_(names), calls.c.status == CallStatus.OPEN.value, calls.c.started_at_ms >= since
    )
    not_ended = sa.select(episodes.c.id).where(
        episodes.c.id.in_(names), episodes.c.status == EpisodeStatus.RUNNING.value
    )
    running = set(conn.execute(under_way).scalars())
    planned, resumable = _to_be_trained(conn, names)
    planned -= running
    # Whoever names an episode wants it gone: a run that nobody may ever resume is no reason to keep it.
    resumable = set() if selection.episode_ids else resumable - running - planned
    ageless = set() if selection.before_ms is None else set(conn.execute(not_ended).scalars())
    ageless -= running | planned | resumable
    staying = running | planned | resumable | ageless
    counts = {
        RUNNING: len(running),
        PLANNED: len(planned),
        RESUMABLE: len(resumable),
        NOT_ENDED: len(ageless),
    }
    return [name for name in names if name not in staying], {
        reason: count for reason, count in counts.items() if count
    }


def _to_be_trained(conn: sa.Connection, names: Sequence[str]) -> tuple[set[str], set[str]]:
    """Those of steps that were planned and not trained: of runs that are at it, and of runs that were
    interrupted and may be resumed.

    The latter are the newest of their policy: whoever has begun another has given the one before up. Runs
    of older versions, which kept no checkpoints, can't be resumed.
    """
    newer = runs.alias()
    is_newest = ~sa.exists().where(
        newer.c.policy == runs.c.policy,
        sa.tuple_(newer.c.created_at_ms, newer.c.id) > sa.tuple_(runs.c.created_at_ms, runs.c.id),
    )
    is_silent = sa.func.coalesce(runs.c.seen_at_ms < now_ms() - SILENT_RUN_MS, sa.false())
    is_at_it = sa.and_(runs.c.status == "running", ~is_silent)
    can_go_on = sa.and_(runs.c.status != "finished", runs.c.start_version.is_not(None), is_newest)
    query = (
        sa.select(manifest_episodes.c.episode_id, is_at_it.label("is_at_it"))
        .join(
            step_manifests,
            sa.and_(
                step_manifests.c.run_id == manifest_episodes.c.run_id,
                step_manifests.c.step == manifest_episodes.c.step,
            ),
        )
        .join(runs, runs.c.id == manifest_episodes.c.run_id)
        .where(
            manifest_episodes.c.episode_id.in_(names),
            step_manifests.c.trained_at_ms.is_(None),
            sa.or_(is_at_it, can_go_on),
        )
    )
    found = conn.execute(query).all()
    planned = {row.episode_id for row in found if row.is_at_it}
    return planned, {row.episode_id for row in found} - planned


def _count(conn: sa.Connection, column: sa.Column[str], names: Sequence[str]) -> dict[str, int]:
    """Calls, choices and rewards of episodes (or calls) by these ids."""
    of_calls = sa.select(calls.c.id).where(column.in_(names))
    counts = {
        "calls": sa.select(sa.func.count()).select_from(of_calls.subquery()),
        "choices": sa.select(sa.func.count()).select_from(choices).where(choices.c.call_id.in_(of_calls)),
    }
    if column is calls.c.episode_id:
        counts["rewards"] = (
            sa.select(sa.func.count()).select_from(rewards).where(rewards.c.episode_id.in_(names))
        )
    return {name: conn.execute(query).scalar_one() for name, query in counts.items()}


def _by_size(database: Database, names: Sequence[str]) -> Iterator[list[str]]:
    """In portions of at most CALLS_PER_LOCK calls; an episode is never split."""
    with database.read() as conn:
        query = sa.select(episodes.c.id, episodes.c.num_calls).where(episodes.c.id.in_(names))
        sizes = conn.execute(query.order_by(episodes.c.id)).all()
    portion: list[str] = []
    num_calls = 0
    for name, size in sizes:
        if portion and num_calls + size > CALLS_PER_LOCK:
            yield portion
            portion, num_calls = [], 0
        portion.append(name)
        num_calls += max(size, 1)
    if portion:
        yield portion


def _delete_episodes(conn: sa.Connection, names: Sequence[str], selection: Selection, done: Pruned) -> None:
    # Locked before anything is looked at: who gives rewards or ends episodes waits, and finds none then.
    query = sa.select(episodes.c.id, episodes.c.group_id).where(
        episodes.c.id.in_(names), *_of_episodes(selection)
    )
    locked = {row.id: row.group_id for row in conn.execute(query.order_by(episodes.c.id).with_for_update())}
    going, left_out = _ready(conn, list(locked), selection)
    done.left_out.update(left_out)
    _delete_calls(
        conn, conn.execute(sa.select(calls.c.id).where(calls.c.episode_id.in_(going))).scalars().all(), done
    )
    for table in reversed(metadata.sorted_tables):
        if "episode_id" in table.c and table.name not in _KEPT:
            _delete(conn, table, table.c.episode_id, going, done)
    _delete_events(conn, "episode", going, done)
    _delete(conn, episodes, episodes.c.id, going, done)
    for chunk in chunks(sorted({locked[name] for name in going if locked[name] is not None})):
        empty = ~sa.exists().where(episodes.c.group_id == groups.c.id)
        done.rows["groups"] += conn.execute(groups.delete().where(groups.c.id.in_(chunk), empty)).rowcount


def _delete_calls(conn: sa.Connection, names: Sequence[str], done: Pruned) -> None:
    # Rewards are no matter of calls: one about a call is its episode's, and a call of the bin has none.
    ends: set[bytes] = set()
    for chunk in chunks(names):
        blocks = sa.select(calls.c.prompt_block).where(
            calls.c.id.in_(chunk), calls.c.prompt_block.is_not(None)
        )
        ends.update(conn.execute(blocks).scalars())
        indexes = sa.select(choices.c.call_id, choices.c.index).where(choices.c.call_id.in_(chunk))
        _delete_events(conn, "choice", [f"{call}/{index}" for call, index in conn.execute(indexes)], done)
    _delete_events(conn, "call", names, done)
    for table in reversed(metadata.sorted_tables):
        if "call_id" in table.c and table.name not in _KEPT and table is not rewards:
            _delete(conn, table, table.c.call_id, names, done)
    _delete(conn, calls, calls.c.id, names, done)
    done.rows["token_blocks"] += collect_chains(conn, ends)


def _delete_events(conn: sa.Connection, subject: str, names: Sequence[str], done: Pruned) -> None:
    for chunk in chunks(names):
        query = events.delete().where(events.c.subject == subject, events.c.subject_id.in_(chunk))
        done.rows["events"] += conn.execute(query).rowcount


def _delete(
    conn: sa.Connection, table: sa.Table, column: sa.Column[str], names: Sequence[str], done: Pruned
) -> None:
    for chunk in chunks(names):
        done.rows[table.name] += conn.execute(table.delete().where(column.in_(chunk))).rowcount


@contextmanager
def only_one(database: Database) -> Iterator[None]:
    """One prune or import at a time on a log. UserError where another is running."""
    busy = UserError(f"another prune or import is running on {database.shown_url}; wait for it")
    if database.engine.dialect.name != "sqlite":
        with database.engine.connect() as conn:
            if not conn.execute(sa.select(sa.func.pg_try_advisory_lock(_PRUNE_KEY))).scalar():
                raise busy
            conn.commit()
            try:
                yield
            finally:
                conn.execute(sa.select(sa.func.pg_advisory_unlock(_PRUNE_KEY)))
        return
    # Not the log itself: closing a second handle of that would drop SQLite's own locks.
    file = Path(f"{database.engine.url.database}-prune")
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
