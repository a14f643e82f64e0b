"""Many rewards in one transaction, and which episodes a source has not judged yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from ..errors import UnknownEpisodeError, UserError
from ..records import EpisodeStatus, Reward
from .episodes import (
    check_superseded,
    check_target,
    check_value,
    end_episode,
    locked,
    reward_of,
    reward_row,
)
from .placement import lock_rows
from .read import as_reward, load_rewards
from .reward_lines import NumberedReward
from .schema import episodes, rewards
from .statements import chunks, insert_missing, storable_text

_WHAT_IT_SAYS = tuple(field.name for field in fields(Reward) if field.name not in ("id", "created_at_ms"))


@dataclass(frozen=True, slots=True)
class Imported:
    added: int
    known: int  # rows that the log held already, under the same id


def import_rewards(conn: sa.Connection, numbered: Sequence[NumberedReward]) -> Imported:
    """Append all of them, or raise and leave it to the caller's transaction that none is kept.

    A row whose id is in the log already must say the same, whenever; then it is counted and left alone.
    """
    known = _rows_of(conn, [item.reward.id for item in numbered])
    # All locks at once, in the order of keys: the proxy's writer takes them so, too.
    owners = lock_rows(conn, {storable_text(item.reward.episode_id) for item in numbered})
    new: list[dict[str, Any]] = []
    ending: dict[str, None] = {}
    for item in numbered:
        reward = item.reward
        had = known.get(storable_text(reward.id))
        if had is not None:
            _require_same(item, had)
            continue
        try:
            row = owners.get(storable_text(reward.episode_id)) or locked(conn, reward.episode_id)
            _check(conn, row.id, reward, known)
        except UserError as error:
            raise type(error)(item.said(str(error))) from None
        known[storable_text(reward.id)] = reward
        new.append(reward_row(row.id, reward))
        if reward.final and row.status == EpisodeStatus.RUNNING.value:
            ending[row.id] = None
    insert_missing(conn, rewards, new)
    for name in ending:
        end_episode(conn, name, by="reward")
    return Imported(len(new), len(numbered) - len(new))


def _check(conn: sa.Connection, episode_id: str, reward: Reward, known: Mapping[str, Reward]) -> None:
    check_value(reward)
    check_target(conn, episode_id, reward)
    if reward.supersedes is not None:
        name = storable_text(reward.supersedes)
        check_superseded(episode_id, reward, known.get(name) or reward_of(conn, name))


def rewards_of(conn: sa.Connection, episode_id: str) -> tuple[Reward, ...]:
    """Every row of the episode by time, superseded ones included. UnknownEpisodeError if there is none."""
    name = storable_text(episode_id)
    if conn.execute(sa.select(episodes.c.id).where(episodes.c.id == name)).first() is None:
        raise UnknownEpisodeError(f"no episode {episode_id!r} in the log; check its name and the database")
    return load_rewards(conn, [name])[name]


def unjudged_episodes(conn: sa.Connection, source: str, *, again: bool = False) -> list[str]:
    """Episodes that are over and not excluded, oldest first, and that have no reward of this source that no
    other row supersedes; `again`: those too."""
    newer = rewards.alias()
    stands = sa.exists().where(
        rewards.c.episode_id == episodes.c.id,
        rewards.c.source == storable_text(source),
        sa.not_(sa.exists().where(newer.c.episode_id == episodes.c.id, newer.c.supersedes == rewards.c.id)),
    )
    over = episodes.c.status.in_([EpisodeStatus.ENDED.value, EpisodeStatus.FAILED.value])
    query = sa.select(episodes.c.id).where(over if again else sa.and_(over, sa.not_(stands)))
    return list(conn.execute(query.order_by(episodes.c.created_at_ms, episodes.c.id)).scalars())


def _rows_of(conn: sa.Connection, ids: Sequence[str]) -> dict[str, Reward]:
    found: dict[str, Reward] = {}
    for chunk in chunks(sorted({storable_text(name) for name in ids})):
        for row in conn.execute(sa.select(rewards).where(rewards.c.id.in_(chunk))):
            found[row.id] = as_reward(row)
    return found


def _require_same(item: NumberedReward, had: Reward) -> None:
    for name in _WHAT_IT_SAYS:
        ours, theirs = getattr(item.reward, name), getattr(had, name)
        if ours != theirs:
            fault = (
                f"reward {had.id!r} is there already, its {name} {theirs!r}, not {ours!r}; rewards are never "
                "changed: give a new id, and supersedes"
            )
            raise UserError(item.said(fault))
