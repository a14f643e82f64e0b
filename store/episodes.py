"""What people and programs say about an episode: that it exists, its purpose, its end, what it was worth.

Every statement leaves a row (an event or a reward); the episode's columns are copies of the newest. Runs in
the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownEpisodeError, UserError
from ..records import EpisodeStatus, Purpose, Reward, RewardTarget, now_ms
from .events import add_event
from .names import require_tag_keys
from .placement import EpisodeRow, insert_episodes, insert_groups, lock_rows, read_rows, write_rows
from .read import as_reward
from .rewards import part_of
from .schema import calls, choices, episodes, events, groups, rewards
from .sharing import refer
from .statements import insert_missing, optional_text, storable_json, storable_text

MAX_REWARD = 1e100
"""Larger numbers are a mistake, and their squares no numbers any more."""


def create_episode(
    conn: sa.Connection,
    *,
    episode_id: str,
    task_id: str | None = None,
    batch: str | None = None,
    expected_size: int | None = None,
    purpose: Purpose = Purpose.TRAIN,
    tags: Mapping[str, str] | None = None,
    policy: str | None = None,
    policy_version: int | None = None,
) -> None:
    """Create the episode, or fill in what an existing one lacks. Saying the same again changes nothing.

    An episode that its calls created has no stated purpose yet, so it takes this one. UserError names the
    first contradiction, and nothing is written then.
    """
    require_tag_keys(tags or ())
    episode_id, task_id, batch = storable_text(episode_id), optional_text(task_id), optional_text(batch)
    if expected_size is not None and expected_size < 1:
        raise UserError(
            f"expected_size of episode {episode_id!r} is {expected_size}; a group has at least one"
        )
    refer(conn)  # to a group that may be about to lose its last episode
    before = read_rows(conn, [episode_id]).get(episode_id, EpisodeRow(episode_id, created_at_ms=now_ms()))
    had_group = before.group_id
    before.adopt_group(task_id, batch)
    if (batch or expected_size is not None) and before.group_id is None:
        raise UserError(
            f"episode {episode_id!r}: a batch or an expected size needs a task; name the task too"
        )
    if before.group_id != had_group:
        insert_groups(conn, [before])
    insert_episodes(conn, {episode_id: now_ms()})
    row = lock_rows(conn, [episode_id])[episode_id]
    said = {
        "task": task_id,
        "batch": batch,
        "purpose": purpose.value,
        "expected_size": expected_size,
        "tags": storable_json(tags or {}),
        "policy": policy,
        "policy_version": policy_version,
    }
    stated = _was_stated(conn, episode_id)
    if stated is None and row.purpose != purpose.value and row.status != EpisodeStatus.RUNNING.value:
        raise UserError(
            f"episode {episode_id!r} has ended as {row.purpose!r}; say what an episode is for before it ends"
        )
    if stated is None:
        row.purpose = purpose.value
    elif row.purpose != purpose.value:
        raise UserError(
            f"episode {episode_id!r} was announced for {row.purpose!r}, not {purpose.value!r}; use another id"
        )
    if conflict := row.adopt_group(task_id, batch):
        raise UserError(f"episode {episode_id!r}: {conflict}; use another episode id")
    _fill(row, storable_json(tags or {}), policy, policy_version)
    insert_groups(conn, [row] if row.group_id else [])
    write_rows(conn, [row])
    if expected_size is not None and row.group_id is not None:
        _set_expected_size(conn, row.group_id, expected_size)
    if stated != said:
        add_event(conn, "episode", episode_id, "created", said, "api")


def end_episode(
    conn: sa.Connection,
    episode_id: str,
    *,
    status: EpisodeStatus = EpisodeStatus.ENDED,
    by: str,
    note: str | None = None,
) -> None:
    """End it as `status`. FAILED and EXCLUDED are stronger than ENDED, which never takes them back.

    The time of the first end stands. Saying the same again writes nothing.
    """
    if status is EpisodeStatus.RUNNING:
        raise UserError(f"episode {episode_id!r} can't be ended as 'running'; use ended, failed or excluded")
    row = locked(conn, episode_id)
    current = EpisodeStatus(row.status)
    if current is status or (status is EpisodeStatus.ENDED and current is not EpisodeStatus.RUNNING):
        return
    conn.execute(
        episodes.update()
        .where(episodes.c.id == row.id)
        .values(
            status=status.value,
            ended_by=sa.func.coalesce(episodes.c.ended_by, storable_text(by)),
            ended_at_ms=sa.func.coalesce(episodes.c.ended_at_ms, now_ms()),
        )
    )
    add_event(conn, "episode", row.id, status.value, None, by, note)


def mark_gap(conn: sa.Connection, episode_id: str, *, source: str, note: str | None = None) -> None:
    """A call of it was served but not recorded: it is never trained. Creates the episode if it must."""
    episode_id = storable_text(episode_id)
    insert_episodes(conn, {episode_id: now_ms()})
    row = locked(conn, episode_id)
    conn.execute(episodes.update().where(episodes.c.id == row.id).values(has_gap=True))
    add_event(conn, "episode", row.id, "gap", None, source, note)


def add_reward(conn: sa.Connection, reward: Reward) -> None:
    """Append the row; a final one ends the episode. The same id again changes nothing.

    UnknownEpisodeError, or UserError when the value is not finite or past `MAX_REWARD`, or the target is not
    in the episode.
    """
    check_value(reward)
    row = locked(conn, reward.episode_id)
    check_target(conn, row.id, reward)
    if reward.supersedes is not None:
        check_superseded(row.id, reward, reward_of(conn, reward.supersedes))
    insert_missing(conn, rewards, [reward_row(row.id, reward)])
    if reward.final:
        end_episode(conn, row.id, by="reward")


def check_value(reward: Reward) -> None:
    if not abs(reward.value) <= MAX_REWARD:  # written so that NaN fails, too
        raise UserError(
            f"a reward must be a finite number, at most {MAX_REWARD:g} in size, got {reward.value}"
        )


def reward_of(conn: sa.Connection, reward_id: str) -> Reward | None:
    row = conn.execute(sa.select(rewards).where(rewards.c.id == storable_text(reward_id))).first()
    return None if row is None else as_reward(row)


def check_superseded(episode_id: str, reward: Reward, older: Reward | None) -> None:
    """Else a word about a part would take the whole's value away."""
    if older is None or older.episode_id != episode_id:
        raise UserError(f"episode {episode_id!r} has no reward {reward.supersedes!r} to supersede")
    about, was_about = part_of(reward), part_of(older)
    if about != was_about:
        raise UserError(
            f"reward {reward.supersedes!r} is about {was_about.describe()}, and one about {about.describe()} "
            "can't supersede it: both must be about the same thing"
        )


def reward_row(episode_id: str, reward: Reward) -> dict[str, Any]:
    """As the table holds it."""
    values = asdict(reward) | {
        "target": reward.target.value,
        "episode_id": episode_id,
        "value": float(reward.value),
    }
    for name in ("id", "agent", "source", "note", "supersedes"):
        values[name] = optional_text(values[name])
    return values


def locked(conn: sa.Connection, episode_id: str) -> EpisodeRow:
    """The episode, this transaction's until it ends. UnknownEpisodeError if there is none."""
    row = lock_rows(conn, [storable_text(episode_id)]).get(storable_text(episode_id))
    if row is None:
        newest = conn.execute(
            sa.select(episodes.c.id).order_by(episodes.c.created_at_ms.desc(), episodes.c.id.desc()).limit(1)
        ).scalar()
        seen = "the log has no episodes yet" if newest is None else f"the newest is {newest!r}"
        raise UnknownEpisodeError(
            f"no episode {episode_id!r} in the log ({seen}); check its name and the database"
        )
    return row


def _was_stated(conn: sa.Connection, episode_id: str) -> Mapping[str, object] | None:
    """What the newest create_episode said; None for an episode that only its calls created."""
    query = sa.select(events.c.value).where(
        events.c.subject == "episode", events.c.subject_id == episode_id, events.c.kind == "created"
    )
    found: Mapping[str, object] | None = conn.execute(
        query.order_by(events.c.created_at_ms.desc(), events.c.id.desc()).limit(1)
    ).scalar()
    return found


def _fill(row: EpisodeRow, tags: dict[str, str], policy: str | None, policy_version: int | None) -> None:
    for key, value in tags.items():
        if row.tags.get(key, value) != value:
            raise UserError(f"episode {row.id!r} has the tag {key}={row.tags[key]!r} already, not {value!r}")
    row.tags = tags | row.tags
    said = {"policy": policy, "policy_version": policy_version}
    for name, given in said.items():
        had = getattr(row, name)
        if given is not None and had not in (None, given):
            raise UserError(f"episode {row.id!r} began with {name} {had!r}, not {given!r}")
        if given is not None:
            setattr(row, name, given)


def _set_expected_size(conn: sa.Connection, group: str, size: int) -> None:
    had = conn.execute(
        sa.select(groups.c.expected_size).where(groups.c.id == group).with_for_update(key_share=True)
    ).scalar()
    if had is None:
        conn.execute(groups.update().where(groups.c.id == group).values(expected_size=size))
    elif had != size:
        raise UserError(f"the episode's group expects {had} episodes, not {size}; use another batch")


def check_target(conn: sa.Connection, episode_id: str, reward: Reward) -> None:
    target = reward.target
    whole = target in (RewardTarget.EPISODE, RewardTarget.AGENT)
    part = (reward.choice_index, reward.token_start, reward.token_end)
    if (target is RewardTarget.AGENT and reward.agent is None) or (not whole and reward.call_id is None):
        which = "agent" if whole else "call"
        raise UserError(f"a reward about {target.value!r} must say which {which}")
    if whole and (reward.call_id or any(said is not None for said in part)):
        raise UserError(f"a reward about {target.value!r} can't name a call, a choice or tokens")
    if reward.agent is not None and target is not RewardTarget.AGENT:
        raise UserError(f"a reward about {target.value!r} can't name an agent")
    if target is RewardTarget.AGENT:
        query = sa.select(calls.c.id).where(
            calls.c.episode_id == episode_id, calls.c.agent == storable_text(str(reward.agent))
        )
        if conn.execute(query.limit(1)).first() is None:
            raise UserError(f"episode {episode_id!r} has no call of an agent {reward.agent!r}")
    if not whole:
        _check_call(conn, episode_id, reward)


def _check_call(conn: sa.Connection, episode_id: str, reward: Reward) -> None:
    call_id = storable_text(str(reward.call_id))
    owner = conn.execute(sa.select(calls.c.episode_id).where(calls.c.id == call_id)).scalar()
    if owner != episode_id:
        raise UserError(f"episode {episode_id!r} has no call {call_id!r}")
    if reward.target is RewardTarget.CALL and reward.token_start is None and reward.choice_index is None:
        return
    index = reward.choice_index or 0
    num_tokens = conn.execute(
        sa.select(choices.c.num_tokens).where(choices.c.call_id == call_id, choices.c.index == index)
    ).scalar()
    if num_tokens is None:
        raise UserError(f"call {call_id!r} has no choice {index}")
    if reward.target is RewardTarget.CALL:
        return
    start, end = reward.token_start, reward.token_end
    if start is None or end is None:
        lacking, other = ("token_start", end) if start is None else ("token_end", start)
        raise UserError(f"a range of tokens has a start and an end: {lacking} is missing beside {other}")
    if not 0 <= start < end <= num_tokens:
        raise UserError(
            f"tokens {start} to {end} are not a range within the {num_tokens} tokens of call {call_id!r}"
        )
