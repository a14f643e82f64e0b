"""Writing exported rows into a log: what is there already stays, what is missing is added.

The whole input is read and checked before the first row is written. Importing the same again changes nothing;
an input that has gone on since (more calls of an episode, an answer to a call that was open) brings the log
up to it. What disagrees (the same id with another history) is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from ...errors import UserError
from ...records import CallStatus, EpisodeStatus, VersionStatus
from ..blocks import block_hash, unpack_ids
from ..bodies import part_name, unpack_part
from ..database import Database
from ..schema import (
    body_parts,
    calls,
    episodes,
    events,
    groups,
    policy_versions,
    runs,
    step_manifests,
    token_blocks,
)
from ..sharing import refer
from ..statements import insert_missing
from .rows import Row

ROWS_PER_TRANSACTION = 500

_BORN = {
    episodes: "created_at_ms",
    calls: "started_at_ms",
    policy_versions: "created_at_ms",
    runs: "created_at_ms",
}
"""What can't differ between two copies of one row."""

Source = Callable[[], Iterable[tuple[sa.Table, Row]]]


def load(
    database: Database, source: Source, on_progress: Callable[[int], None] = lambda rows: None
) -> tuple[Counter[str], Counter[str]]:
    """(rows read, rows added), by table. `source` is read twice: to check, then to write."""
    read: Counter[str] = Counter()
    for table, page in _pages(source()):
        for row in page:
            _check_hash(table, row)
        _check_same(database, table, page)
        read[table.name] += len(page)
    added: Counter[str] = Counter()
    for table, page in _pages(source()):
        with database.write() as conn:
            refer(conn)
            before = _existing(conn, table, page)
            insert_missing(conn, table, page)
            _bring_up(conn, table, page, before)
        added[table.name] += len(page) - len(before)
        on_progress(len(page))
    _settle_statuses(database, source)
    return read, added


def _pages(rows: Iterable[tuple[sa.Table, Row]]) -> Iterator[tuple[sa.Table, list[Row]]]:
    """Runs of rows of one table, in the order of the input; each key once."""
    at: sa.Table | None = None
    page: dict[tuple[Any, ...], Row] = {}
    for table, row in rows:
        if page and (table is not at or len(page) >= ROWS_PER_TRANSACTION):
            assert at is not None
            yield at, list(page.values())
            page = {}
        at = table
        page[_key(table, row)] = row
    if page:
        assert at is not None
        yield at, list(page.values())


def _key(table: sa.Table, row: Row) -> tuple[Any, ...]:
    return tuple(row[column.name] for column in table.primary_key.columns)


def _check_hash(table: sa.Table, row: Row) -> None:
    """Of shared rows: what others would refer to must be what its name says."""
    try:
        is_whole = True
        if table is token_blocks:
            is_whole = block_hash(row["parent"], unpack_ids(row["ids"])) == row["hash"]
        elif table is body_parts:
            is_whole = part_name(unpack_part(row["bytes"])) == row["hash"]
    except Exception:  # noqa: BLE001 - whatever it is, it can't be unpacked
        is_whole = False
    if not is_whole:
        raise UserError(
            f"{table.name} {row['hash'].hex()} of the input is damaged: its hash is another; "
            "nothing was imported, export it anew"
        )


def _existing(conn: sa.Connection, table: sa.Table, page: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """Those of the rows that the log has, as it has them."""
    keys = list(table.primary_key.columns)
    # By the first column, which is selective in every table: SQLite knows no index for tuples in a list.
    query = sa.select(table).where(keys[0].in_({row[keys[0].name] for row in page}))
    if len(keys) > 1:
        query = query.where(keys[1].in_({row[keys[1].name] for row in page}))
    found = (dict(row._mapping) for row in conn.execute(query))
    wanted = {_key(table, row) for row in page}
    return {_key(table, row): row for row in found if _key(table, row) in wanted}


def _check_same(database: Database, table: sa.Table, page: Sequence[Row]) -> None:
    born = _BORN.get(table)
    if born is None:
        return
    with database.read() as conn:
        there = _existing(conn, table, page)
        taken = _taken_places(conn, page) if table is calls else {}
    for row in page:
        other = there.get(_key(table, row))
        if other is not None and other[born] != row[born]:
            name = "/".join(map(str, _key(table, row)))
            raise _another_history(f"{table.name} {name!r}")
        if table is calls and taken.get((row["episode_id"], row["ordinal"]), row["id"]) != row["id"]:
            raise _another_history(f"call {row['ordinal']} of episode {row['episode_id']!r}")


def _taken_places(conn: sa.Connection, page: Sequence[Row]) -> dict[tuple[str | None, int | None], str]:
    """Episode and ordinal -> id of the call that the log has there."""
    named = {row["episode_id"] for row in page if row["episode_id"] is not None}
    query = sa.select(calls.c.episode_id, calls.c.ordinal, calls.c.id).where(calls.c.episode_id.in_(named))
    return {(episode, ordinal): name for episode, ordinal, name in conn.execute(query)}


def _another_history(what: str) -> UserError:
    return UserError(
        f"the log has {what} already, with another history; nothing was imported: "
        "import into a log of its own"
    )


def _bring_up(
    conn: sa.Connection, table: sa.Table, page: Sequence[Row], before: dict[tuple[Any, ...], Row]
) -> None:
    """Rows that were there and have gone on in the input."""
    for row in page:
        had = before.get(_key(table, row))
        if had is None:
            continue
        if table is calls and _call_went_on(had, row):
            changes = row
        elif table is episodes:
            changes = _episode_changes(had, row)
        elif table is groups or table in (policy_versions, runs, step_manifests):
            changes = {name: value for name, value in row.items() if had[name] is None and value is not None}
            if table is runs and had["ended_at_ms"] is None:
                changes["status"] = row["status"]
        else:
            continue
        changes = {name: value for name, value in changes.items() if value != had[name]}
        if changes:
            where = (column == row[column.name] for column in table.primary_key.columns)
            conn.execute(table.update().where(*where).values(changes))


def _call_went_on(had: Row, row: Row) -> bool:
    is_open = CallStatus.OPEN.value
    return (had["status"] == is_open and row["status"] != is_open) or (
        had["episode_id"] is None and row["episode_id"] is not None
    )


def _episode_changes(had: Row, row: Row) -> Row:
    changes = {name: value for name, value in row.items() if had[name] is None and value is not None}
    changes["num_calls"] = max(had["num_calls"], row["num_calls"])
    changes["last_call_at_ms"] = max(had["last_call_at_ms"] or 0, row["last_call_at_ms"] or 0) or None
    changes["has_gap"] = had["has_gap"] or row["has_gap"]
    changes["tags"] = row["tags"] | had["tags"]
    return changes


def _settle_statuses(database: Database, source: Source) -> None:
    """A status is a copy of its newest event: of the input's, or of the log's own."""
    names: dict[str, tuple[sa.ColumnElement[bool], ...]]
    for table, page in _pages(source()):
        if table is episodes:
            names = {row["id"]: (episodes.c.id == row["id"],) for row in page}
            _settle(database, table, "episode", [status.value for status in EpisodeStatus], names)
        elif table is policy_versions:
            names = {
                f"{row['policy']}/{row['version']}": (
                    policy_versions.c.policy == row["policy"],
                    policy_versions.c.version == row["version"],
                )
                for row in page
            }
            _settle(database, table, "policy_version", [status.value for status in VersionStatus], names)


def _settle(
    database: Database,
    table: sa.Table,
    subject: str,
    kinds: Sequence[str],
    names: dict[str, tuple[sa.ColumnElement[bool], ...]],
) -> None:
    with database.write() as conn:
        query = sa.select(events.c.subject_id, events.c.kind).where(
            events.c.subject == subject, events.c.subject_id.in_(names), events.c.kind.in_(kinds)
        )
        newest = conn.execute(query.order_by(events.c.created_at_ms, events.c.id)).all()
        for name, kind in dict(tuple(row) for row in newest).items():
            where = (*names[name], table.c.status != kind)
            conn.execute(table.update().where(*where).values(status=kind))
