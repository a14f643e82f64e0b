"""Groups, episodes, rewards, keys and events: counts, statuses and targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ...records import EpisodeStatus, Purpose, RewardTarget
from ..placement import group_id
from ..schema import calls, choices, episodes, events, groups, policy_versions, rewards, runs
from ..statements import existing
from .report import REPORT, RESTORE, Findings

_STATUSES = tuple(status.value for status in EpisodeStatus)
_PURPOSES = frozenset(purpose.value for purpose in Purpose)
_TARGETS = frozenset(target.value for target in RewardTarget)


def check_groups(conn: sa.Connection, findings: Findings) -> None:
    for page in findings.pages(conn, "groups", sa.select(groups)):
        for row in page:
            if row.id != group_id(row.task_id, row.batch):
                findings.fault("groups", row.id, "its id is not the hash of its task and batch", RESTORE)


def check_episodes(conn: sa.Connection, findings: Findings) -> None:
    query = sa.select(episodes, groups.c.task_id.label("group_task")).outerjoin(
        groups, groups.c.id == episodes.c.group_id
    )
    for page in findings.pages(conn, "episodes", query.order_by(episodes.c.id)):
        names = [row.id for row in page]
        newest = newest_events(conn, "episode", names, _STATUSES)
        gaps = newest_events(conn, "episode", names, ("gap",))
        for row in page:
            _check_episode(row, newest.get(row.id), row.id in gaps, findings)
        _check_ordinals(conn, page, findings)


def _check_episode(row: sa.Row[Any], newest: str | None, has_gap: bool, findings: Findings) -> None:
    def wrong(what: str, todo: str = REPORT) -> None:
        findings.fault("episodes", row.id, what, todo)

    if row.purpose not in _PURPOSES:
        wrong(f"its purpose is {row.purpose!r}", RESTORE)
    if row.status not in _STATUSES:
        wrong(f"its status is {row.status!r}", RESTORE)
    elif row.status != (newest or EpisodeStatus.RUNNING.value):
        wrong(f"its status is {row.status}, its newest event says {newest or 'nothing'}")
    if (row.ended_at_ms is None) != (row.status == EpisodeStatus.RUNNING.value):
        wrong(f"it is {row.status}, and its end is {row.ended_at_ms}")
    if row.has_gap != has_gap:
        wrong(
            "it is marked as having a gap without an event" if row.has_gap else "the mark of its gap is gone"
        )
    if row.group_id is not None and row.group_task != row.task_id:
        wrong(f"its task is {row.task_id!r}, its group's {row.group_task!r}")


def _check_ordinals(conn: sa.Connection, page: Sequence[sa.Row[Any]], findings: Findings) -> None:
    """Each call has a place of its own; places are given out without gaps by the episode's counter."""
    query = (
        sa.select(
            calls.c.episode_id,
            sa.func.count(),
            sa.func.count(calls.c.ordinal.distinct()),
            sa.func.min(calls.c.ordinal),
            sa.func.max(calls.c.ordinal),
        )
        .where(calls.c.episode_id.in_([row.id for row in page]))
        .group_by(calls.c.episode_id)
    )
    found = {row[0]: tuple(row)[1:] for row in conn.execute(query)}
    for row in page:
        count, places, first, last = found.get(row.id, (0, 0, None, None))
        if count != places:
            findings.fault("episodes", row.id, f"{count} calls share {places} places", REPORT)
        elif last is not None and (first < 0 or last >= row.num_calls):
            what = f"its calls have the places {first} to {last}, its counter is at {row.num_calls}"
            findings.fault("episodes", row.id, what, REPORT)
        elif count != row.num_calls:
            what = f"it has counted {row.num_calls} calls, and holds {count}"
            findings.fault("episodes", row.id, what, RESTORE)


def newest_events(
    conn: sa.Connection, subject: str, names: Sequence[str], kinds: Sequence[str]
) -> dict[str, str]:
    """Subject id -> kind of its newest event among these kinds."""
    query = (
        sa.select(events.c.subject_id, events.c.kind)
        .where(events.c.subject == subject, events.c.subject_id.in_(names), events.c.kind.in_(kinds))
        .order_by(events.c.created_at_ms, events.c.id)
    )
    return dict(tuple(row) for row in conn.execute(query))


def check_rewards(conn: sa.Connection, findings: Findings) -> None:
    older = rewards.alias("older")
    query = (
        sa.select(
            rewards,
            calls.c.episode_id.label("owner"),
            choices.c.num_tokens,
            older.c.episode_id.label("older_owner"),
        )
        .outerjoin(calls, calls.c.id == rewards.c.call_id)
        .outerjoin(
            choices,
            sa.and_(
                choices.c.call_id == rewards.c.call_id,
                choices.c.index == sa.func.coalesce(rewards.c.choice_index, 0),
            ),
        )
        .outerjoin(older, older.c.id == rewards.c.supersedes)
    )
    for page in findings.pages(conn, "rewards", query):
        for row in page:
            _check_reward(row, findings)


def _check_reward(row: sa.Row[Any], findings: Findings) -> None:
    def wrong(what: str, todo: str = RESTORE) -> None:
        findings.fault("rewards", row.id, what, todo)

    if row.target not in _TARGETS:
        wrong(f"its target is {row.target!r}")
    if not math.isfinite(row.value):
        wrong(f"its value is {row.value}")
    if row.call_id is not None and row.owner is None:
        wrong(f"its call {row.call_id!r} is missing")
    elif row.call_id is not None and row.owner != row.episode_id:
        wrong(f"its call {row.call_id!r} is of another episode, {row.owner!r}", REPORT)
    elif row.choice_index is not None and row.num_tokens is None:
        wrong(f"choice {row.choice_index} of its call {row.call_id!r} is missing")
    elif row.token_end is not None and not 0 <= row.token_start < row.token_end <= (row.num_tokens or 0):
        wrong(f"tokens {row.token_start} to {row.token_end} are not within its call's {row.num_tokens}")
    if row.supersedes is not None and row.older_owner != row.episode_id:
        wrong(f"the reward {row.supersedes!r} that it supersedes is not in its episode")


def check_events(conn: sa.Connection, findings: Findings) -> None:
    for page in findings.pages(conn, "events", sa.select(events.c.id, events.c.subject, events.c.subject_id)):
        for subject, ids in _by_subject(page).items():
            there = _existing_subjects(conn, subject, [name for _, name in ids])
            for row_id, name in ids:
                if name not in there:
                    findings.fault("events", row_id, f"there is no {subject} {name!r}", RESTORE)


def _by_subject(page: Sequence[sa.Row[Any]]) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for row in page:
        found.setdefault(row.subject, []).append((row.id, row.subject_id))
    return found


def _existing_subjects(conn: sa.Connection, subject: str, names: list[str]) -> set[str]:
    if subject == "episode":
        return existing(conn, episodes.c.id, names)
    if subject == "call":
        return existing(conn, calls.c.id, names)
    if subject == "choice":
        owners = [name.rpartition("/")[0] for name in names]
        query = sa.select(choices.c.call_id, choices.c.index).where(choices.c.call_id.in_(owners))
        return {f"{call}/{index}" for call, index in conn.execute(query)}
    if subject == "policy_version":
        query = sa.select(policy_versions.c.policy, policy_versions.c.version)
        return {f"{policy}/{version}" for policy, version in conn.execute(query)}
    if subject == "run":
        return existing(conn, runs.c.id, names)
    return set(names)  # of a newer program's kind
