"""The read side: rows back into records, a few queries for many episodes. Never scans `calls`.

Which groups are ready to train is store/selection.py's matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownEpisodeError
from ..records import (
    Call,
    CallKind,
    CallStatus,
    Choice,
    Episode,
    EpisodeStatus,
    Group,
    Purpose,
    Quarantine,
    Reward,
    RewardTarget,
    TokenIds,
    logprobs,
    token_ids,
)
from .blocks import load_prompts, unpack_floats, unpack_ids
from .placement import group_id
from .schema import calls, choices, episodes, groups, rewards
from .selection import EpisodeCounts, GroupCounts, count_episodes, count_groups, trainable_group_ids
from .statements import chunks

__all__ = [
    "EpisodeCounts",
    "GroupCounts",
    "as_reward",
    "calls_by_upstream_ids",
    "count_episodes",
    "count_groups",
    "group_id",
    "load_episodes",
    "load_groups",
    "load_rewards",
    "trainable_group_ids",
]


def load_episodes(conn: sa.Connection, ids: Iterable[str]) -> list[Episode]:
    """The episodes with calls, exact tokens and rewards, in the order asked for; each once.

    UnknownEpisodeError if one is not there.
    """
    wanted = list(dict.fromkeys(ids))
    rows = {row.id: row for row in _by(conn, episodes, episodes.c.id, wanted)}
    missing = [name for name in wanted if name not in rows]
    if missing:
        raise UnknownEpisodeError(f"no episode {missing[0]!r} in the log; check its name and the database")
    by_episode: dict[str, list[Call]] = defaultdict(list)
    for call in _load_calls(conn, _by(conn, calls, calls.c.episode_id, wanted)):
        by_episode[call.episode_id].append(call)
    reward_rows = load_rewards(conn, wanted)
    return [_episode(rows[name], by_episode[name], reward_rows[name]) for name in wanted]


def load_groups(conn: sa.Connection, group_ids: Iterable[str]) -> list[Group]:
    """The groups in the order asked for, with all their episodes by age: of every status and purpose."""
    wanted = list(dict.fromkeys(group_ids))
    rows = {row.id: row for row in _by(conn, groups, groups.c.id, wanted)}
    members: dict[str, list[str]] = defaultdict(list)
    for chunk in chunks(wanted):
        query = sa.select(episodes.c.group_id, episodes.c.id).where(episodes.c.group_id.in_(chunk))
        for group, name in conn.execute(query.order_by(episodes.c.created_at_ms, episodes.c.id)):
            members[group].append(name)
    loaded = {episode.id: episode for episode in load_episodes(conn, [n for g in wanted for n in members[g]])}
    return [
        Group(
            id=name,
            task_id=rows[name].task_id,
            batch=rows[name].batch,
            expected_size=rows[name].expected_size,
            episodes=tuple(loaded[member] for member in members[name]),
        )
        for name in wanted
        if name in rows
    ]


def calls_by_upstream_ids(conn: sa.Connection, ids: Iterable[str]) -> dict[str, Call]:
    """Calls by the id that the client saw in the answer; the newest where a client made two share one.

    A call of the unattributed bin has episode id "" and ordinal -1.
    """
    rows = sorted(_by(conn, calls, calls.c.upstream_id, list(dict.fromkeys(ids))), key=lambda row: row.id)
    return {row.upstream_id: call for row, call in zip(rows, _load_calls(conn, rows), strict=True)}


def load_rewards(conn: sa.Connection, episode_ids: Iterable[str]) -> dict[str, tuple[Reward, ...]]:
    """All rows of each episode by (time, id); superseded ones included."""
    found: dict[str, list[Reward]] = {name: [] for name in episode_ids}
    for row in _by(conn, rewards, rewards.c.episode_id, list(found)):
        found[row.episode_id].append(as_reward(row))
    return {
        name: tuple(sorted(given, key=lambda reward: (reward.created_at_ms, reward.id)))
        for name, given in found.items()
    }


def _by(
    conn: sa.Connection, table: sa.Table, column: sa.Column[Any], values: Sequence[str]
) -> list[sa.Row[Any]]:
    return [
        row for chunk in chunks(values) for row in conn.execute(sa.select(table).where(column.in_(chunk)))
    ]


def _load_calls(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Call]:
    """One Call per row, in the order of the rows."""
    by_call: dict[str, list[Choice]] = defaultdict(list)
    for row in _by(conn, choices, choices.c.call_id, [row.id for row in rows]):
        by_call[row.call_id].append(_choice(row))
    prompts = load_prompts(conn, {row.prompt_block for row in rows if row.prompt_block is not None})
    return [_call(row, by_call[row.id], prompts) for row in rows]


def _episode(row: sa.Row[Any], its_calls: list[Call], its_rewards: tuple[Reward, ...]) -> Episode:
    return Episode(
        id=row.id,
        task_id=row.task_id,
        group_id=row.group_id,
        purpose=Purpose(row.purpose),
        status=EpisodeStatus(row.status),
        created_at_ms=row.created_at_ms,
        ended_at_ms=row.ended_at_ms,
        tags=row.tags,
        calls=tuple(sorted(its_calls, key=lambda call: (call.ordinal, call.id))),
        rewards=its_rewards,
        has_gap=row.has_gap,
    )


def _call(row: sa.Row[Any], its_choices: list[Choice], prompts: Mapping[bytes, TokenIds]) -> Call:
    return Call(
        id=row.id,
        episode_id=row.episode_id or "",
        ordinal=-1 if row.ordinal is None else row.ordinal,
        agent=row.agent,
        kind=CallKind(row.kind),
        parent_call_id=row.parent_call_id,
        state_key=row.state_key,
        policy=row.policy,
        policy_version=row.policy_version,
        policy_version_end=row.policy_version_end,
        status=CallStatus(row.status),
        delivered=row.delivered,
        fingerprint_id=row.fingerprint_id,
        sampling=row.sampling,
        prompt_ids=token_ids() if row.prompt_block is None else prompts[row.prompt_block],
        choices=tuple(sorted(its_choices, key=lambda choice: choice.index)),
    )


def _choice(row: sa.Row[Any]) -> Choice:
    packed_ids, packed_logprobs = row.completion_ids, row.behavior_logprobs
    return Choice(
        call_id=row.call_id,
        index=row._mapping["index"],  # `row.index` is the tuple's method
        completion_ids=token_ids() if packed_ids is None else unpack_ids(packed_ids),
        behavior_logprobs=logprobs() if packed_logprobs is None else unpack_floats(packed_logprobs),
        finish_reason=row.finish_reason,
        quarantine=None if row.quarantine is None else Quarantine(row.quarantine),
        used=row.used,
    )


def as_reward(row: sa.Row[Any]) -> Reward:
    return Reward(**{**row._mapping, "target": RewardTarget(row.target)})
