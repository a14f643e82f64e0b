"""Which rows an export holds, in an order in which they can be written: what is referred to comes first.

One snapshot, some episodes at a time. Left out: episode keys (they open this log's proxy, not another's) and
whatever belongs to the running of this installation rather than to what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from ...errors import UnknownEpisodeError
from ..bodies import part_names
from ..schema import (
    body_parts,
    calls,
    choices,
    episodes,
    events,
    fingerprints,
    groups,
    manifest_choices,
    manifest_episodes,
    policy_versions,
    rewards,
    runs,
    step_manifests,
    token_blocks,
)
from ..statements import chunks

EPISODES_PER_PAGE = 100
CALLS_PER_PAGE = 500

TABLES = (
    groups,
    fingerprints,
    episodes,
    token_blocks,
    body_parts,
    calls,
    choices,
    rewards,
    events,
    policy_versions,
    runs,
    step_manifests,
    manifest_episodes,
    manifest_choices,
)
"""In this order a row comes after those that it refers to."""

Row = dict[str, Any]
Rows = tuple[sa.Table, list[Row]]


@dataclass(frozen=True, slots=True)
class Part:
    """What is wanted of a log: all that is said must hold. With episodes named, runs stay out."""

    episode_ids: tuple[str, ...] = ()
    policy: str | None = None  # that the episode began with
    since_ms: int | None = None  # episodes begun then or later

    def shown(self) -> dict[str, Any]:
        said = {"episodes": list(self.episode_ids), "policy": self.policy, "since_ms": self.since_ms}
        return {name: value for name, value in said.items() if value}


@dataclass(slots=True)
class _Seen:
    """Keys of shared rows that are out already."""

    names: dict[str, set[Any]] = field(default_factory=dict)

    def new(self, table: sa.Table, names: Sequence[Any]) -> list[Any]:
        seen = self.names.setdefault(table.name, set())
        found = sorted({name for name in names if name is not None} - seen)
        seen.update(found)
        return found


def count_episodes(conn: sa.Connection, part: Part) -> int:
    query = sa.select(sa.func.count()).select_from(episodes).where(*_wanted(part))
    return conn.execute(query).scalar_one()


def part_rows(conn: sa.Connection, part: Part) -> Iterator[Rows]:
    """UnknownEpisodeError, before any row, for an episode that is named and not there."""
    names = list(
        conn.execute(sa.select(episodes.c.id).where(*_wanted(part)).order_by(episodes.c.id)).scalars()
    )
    missing = set(part.episode_ids) - set(names)
    if missing:
        raise UnknownEpisodeError(f"no episode {min(missing)!r} in the log; nothing was exported")
    seen = _Seen()
    for page in chunks(names, EPISODES_PER_PAGE):
        yield from _episode_rows(conn, page, seen)
    if not part.episode_ids:
        bin_ids = (
            conn.execute(sa.select(calls.c.id).where(*_in_bin(part)).order_by(calls.c.id)).scalars().all()
        )
        for page in chunks(bin_ids, CALLS_PER_PAGE):
            yield from _call_rows(conn, page, seen)
        yield from _training_rows(conn, part)


def _wanted(part: Part) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = []
    if part.episode_ids:
        where.append(episodes.c.id.in_(part.episode_ids))
    if part.policy is not None:
        where.append(episodes.c.policy == part.policy)
    if part.since_ms is not None:
        where.append(episodes.c.created_at_ms >= part.since_ms)
    return where


def _in_bin(part: Part) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = [calls.c.episode_id.is_(None)]
    if part.policy is not None:
        where.append(calls.c.policy == part.policy)
    if part.since_ms is not None:
        where.append(calls.c.started_at_ms >= part.since_ms)
    return where


def _episode_rows(conn: sa.Connection, names: list[str], seen: _Seen) -> Iterator[Rows]:
    rows = _by(conn, episodes, episodes.c.id, names)
    yield groups, _by(conn, groups, groups.c.id, seen.new(groups, [row["group_id"] for row in rows]))
    yield episodes, rows
    query = sa.select(calls.c.id).where(calls.c.episode_id.in_(names))
    ids = conn.execute(query.order_by(calls.c.episode_id, calls.c.ordinal)).scalars().all()
    for page in chunks(ids, CALLS_PER_PAGE):
        yield from _call_rows(conn, page, seen)
    yield rewards, _by(conn, rewards, rewards.c.episode_id, names)
    yield events, _events(conn, "episode", names)


def _call_rows(conn: sa.Connection, ids: list[str], seen: _Seen) -> Iterator[Rows]:
    rows = _by(conn, calls, calls.c.id, ids)
    prints = seen.new(fingerprints, [row["fingerprint_id"] for row in rows])
    yield fingerprints, _by(conn, fingerprints, fingerprints.c.id, prints)
    yield token_blocks, _blocks(conn, [row["prompt_block"] for row in rows], seen)
    bodies = [row["request_body"] for row in rows if row["request_body"] is not None]
    parts = seen.new(body_parts, [name for body in bodies for name in part_names(body)])
    yield body_parts, _by(conn, body_parts, body_parts.c.hash, parts)
    yield calls, rows
    answers = _by(conn, choices, choices.c.call_id, ids)
    yield choices, answers
    yield events, _events(conn, "call", ids)
    yield events, _events(conn, "choice", [f"{row['call_id']}/{row['index']}" for row in answers])


def _blocks(conn: sa.Connection, ends: list[bytes | None], seen: _Seen) -> list[Row]:
    """The chains of these prompts, without blocks that are out already; parents before children."""
    found: dict[bytes, Row] = {}
    wanted = seen.new(token_blocks, ends)
    while wanted:
        rows = _by(conn, token_blocks, token_blocks.c.hash, wanted)
        found.update((row["hash"], row) for row in rows)
        wanted = seen.new(token_blocks, [row["parent"] for row in rows])
    return sorted(found.values(), key=lambda row: (row["num_tokens"], row["hash"]))


def _training_rows(conn: sa.Connection, part: Part) -> Iterator[Rows]:
    of_versions = [] if part.policy is None else [policy_versions.c.policy == part.policy]
    of_runs = [] if part.policy is None else [runs.c.policy == part.policy]
    order = (policy_versions.c.policy, policy_versions.c.version)
    for rows in _pages(conn, sa.select(policy_versions).where(*of_versions).order_by(*order)):
        yield policy_versions, rows
        yield events, _events(conn, "policy_version", [f"{row['policy']}/{row['version']}" for row in rows])
    chosen = sa.select(runs.c.id).where(*of_runs)
    yield runs, _all(conn, sa.select(runs).where(*of_runs).order_by(runs.c.id))
    for table in (step_manifests, manifest_episodes, manifest_choices):
        query = sa.select(table).where(table.c.run_id.in_(chosen)).order_by(*table.primary_key.columns)
        for rows in _pages(conn, query):
            yield table, rows


def _events(conn: sa.Connection, subject: str, names: Sequence[str]) -> list[Row]:
    found = []
    for chunk in chunks(names):
        query = sa.select(events).where(events.c.subject == subject, events.c.subject_id.in_(chunk))
        found += _all(conn, query.order_by(events.c.subject_id, events.c.created_at_ms, events.c.id))
    return found


def _by(conn: sa.Connection, table: sa.Table, column: sa.Column[Any], names: Sequence[Any]) -> list[Row]:
    """In the order of the names where they are unique, by key otherwise."""
    found = []
    for chunk in chunks(names):
        query = sa.select(table).where(column.in_(chunk)).order_by(*table.primary_key.columns)
        found += _all(conn, query)
    if list(table.primary_key.columns) == [column]:
        at = {name: place for place, name in enumerate(names)}
        found.sort(key=lambda row: at[row[column.name]])
    return found


def _all(conn: sa.Connection, query: sa.Select[Any]) -> list[Row]:
    return [dict(row._mapping) for row in conn.execute(query)]


def _pages(conn: sa.Connection, query: sa.Select[Any]) -> Iterator[list[Row]]:
    result = conn.execute(query, execution_options={"yield_per": CALLS_PER_PAGE})
    for page in result.partitions(CALLS_PER_PAGE):
        yield [dict(row._mapping) for row in page]
