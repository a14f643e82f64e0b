"""Pages of episodes and of unattributed calls, newest first. Reads indexes and one page of rows; no token.

A cursor is the id of the last row of the page before: rows that come in meanwhile neither shift nor repeat
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from ..errors import UnknownEpisodeError, UserError
from ..records import EpisodeStatus, Purpose, RewardTarget
from .read import load_rewards
from .rewards import resolve
from .schema import calls, episodes, events, groups, rewards
from .statements import storable_text

T = TypeVar("T")

MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Everything that is named must hold; None and empty: any."""

    task: str | None = None
    batch: str | None = None
    status: EpisodeStatus | None = None
    purpose: Purpose | None = None
    policy: str | None = None  # that it began with
    agent: str | None = None  # made at least one of its calls
    tags: Mapping[str, str] = field(default_factory=dict)
    since_ms: int | None = None
    until_ms: int | None = None
    unrewarded: bool = False  # nobody has rewarded the whole episode
    with_gap: bool = False
    late_calls: bool = False  # a call came after its end


@dataclass(frozen=True, slots=True)
class EpisodeLine:
    """One episode as a list shows it. `reward` None: none that stands."""

    id: str
    task_id: str | None
    batch: str | None
    purpose: str
    status: str
    ended_by: str | None
    policy: str | None
    policy_version: int | None
    num_calls: int
    has_gap: bool
    tags: Mapping[str, str]
    created_at_ms: int
    last_call_at_ms: int | None
    ended_at_ms: int | None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class CallLine:
    """One call of the unattributed bin."""

    id: str
    kind: str
    agent: str | None
    requested_model: str | None
    policy: str | None
    policy_version: int | None
    status: str
    rule: str
    num_prompt_tokens: int | None
    tags: Mapping[str, str]
    started_at_ms: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`next` None: this was the last page."""

    rows: tuple[T, ...]
    next: str | None


def has_policy(conn: sa.Connection, name: str) -> bool:
    """Whether any episode of the log began with it."""
    query = sa.select(episodes.c.id).where(episodes.c.policy == storable_text(name)).limit(1)
    return conn.execute(query).first() is not None


def list_episodes(
    conn: sa.Connection, wanted: EpisodeFilter, *, limit: int = 50, after: str | None = None
) -> Page[EpisodeLine]:
    """UnknownEpisodeError where `after` names no episode."""
    names = [name for name in EpisodeLine.__dataclass_fields__ if name not in ("batch", "reward")]
    query = (
        sa.select(*(episodes.c[name] for name in names), groups.c.batch)
        .outerjoin(groups, groups.c.id == episodes.c.group_id)
        .where(*_conditions(wanted))
        .order_by(episodes.c.created_at_ms.desc(), episodes.c.id.desc())
        .limit(_checked(limit) + 1)
    )
    if after is not None:
        after = storable_text(after)
        at = conn.execute(sa.select(episodes.c.created_at_ms).where(episodes.c.id == after)).scalar()
        if at is None:
            raise UnknownEpisodeError(
                f"no episode {after!r} in the log to go on after; start without a cursor"
            )
        query = query.where(sa.tuple_(episodes.c.created_at_ms, episodes.c.id) < sa.tuple_(at, after))
    found = conn.execute(query).all()
    page = found[:limit]
    given = load_rewards(conn, [row.id for row in page])
    lines = tuple(EpisodeLine(**row._mapping, reward=resolve(given[row.id]).value) for row in page)
    return Page(lines, lines[-1].id if len(found) > limit else None)


def list_unattributed(conn: sa.Connection, *, limit: int = 50, after: str | None = None) -> Page[CallLine]:
    """Calls that no mark named an episode for, newest first (our call ids sort by time)."""
    columns = [
        calls.c.attribution_rule.label("rule") if name == "rule" else calls.c[name]
        for name in CallLine.__dataclass_fields__
    ]
    query = sa.select(*columns).where(calls.c.episode_id.is_(None))
    if after is not None:
        query = query.where(calls.c.id < storable_text(after))
    found = conn.execute(query.order_by(calls.c.id.desc()).limit(_checked(limit) + 1)).all()
    page = tuple(CallLine(**row._mapping) for row in found[:limit])
    return Page(page, page[-1].id if len(found) > limit else None)


def _checked(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        raise UserError(f"a page has 1 to {MAX_PAGE} rows, not {limit}; go on with the cursor")
    return limit


def _conditions(wanted: EpisodeFilter) -> list[sa.ColumnElement[bool]]:
    """In the caller's query, `groups` is joined."""
    said: dict[Any, Any] = {
        episodes.c.task_id: wanted.task,
        groups.c.batch: wanted.batch,
        episodes.c.status: wanted.status and wanted.status.value,
        episodes.c.purpose: wanted.purpose and wanted.purpose.value,
        episodes.c.policy: wanted.policy,
    }
    found = [column == _text(value) for column, value in said.items() if value is not None]
    for key, value in wanted.tags.items():
        found.append(episodes.c.tags[_text(key)].as_string() == _text(value))
    if wanted.since_ms is not None:
        found.append(episodes.c.created_at_ms >= wanted.since_ms)
    if wanted.until_ms is not None:
        found.append(episodes.c.created_at_ms < wanted.until_ms)
    if wanted.agent is not None:
        found.append(
            sa.exists().where(calls.c.agent == _text(wanted.agent), calls.c.episode_id == episodes.c.id)
        )
    if wanted.unrewarded:
        found.append(~sa.exists().where(rewards.c.episode_id == episodes.c.id, _whole_episode))
    if wanted.with_gap:
        found.append(sa.literal_column("episodes.has_gap"))  # as its index says it
    if wanted.late_calls:
        found.append(
            sa.exists().where(
                events.c.subject == "episode",
                events.c.subject_id == episodes.c.id,
                events.c.kind == "late_call",
            )
        )
    return found


_whole_episode = rewards.c.target == RewardTarget.EPISODE.value


def _text(value: Any) -> str:
    return storable_text(str(value))
