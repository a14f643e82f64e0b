"""What a running baseline is made of: every training episode of a policy that ended, with its reward rows.

One query for the episodes and one for their rewards; no call and no token is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from ..records import EpisodeStatus, Purpose, Reward
from .read import load_rewards
from .schema import calls, episodes


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    id: str
    task_id: str | None
    tags: Mapping[str, str]
    ended_at_ms: int
    rewards: tuple[Reward, ...]


def ended_episodes(conn: sa.Connection, policy: str) -> list[EndedEpisode]:
    """Those made for training that ended well and without a gap, with a call of the policy; by their end."""
    served = sa.exists().where(calls.c.episode_id == episodes.c.id, calls.c.policy == policy)
    query = (
        sa.select(episodes.c.id, episodes.c.task_id, episodes.c.tags, episodes.c.ended_at_ms)
        .where(
            episodes.c.status == EpisodeStatus.ENDED.value,
            episodes.c.purpose == Purpose.TRAIN.value,
            episodes.c.has_gap.is_(False),
            episodes.c.ended_at_ms.is_not(None),
            served,
        )
        .order_by(episodes.c.ended_at_ms, episodes.c.id)
    )
    rows = conn.execute(query).all()
    rewards = load_rewards(conn, [row.id for row in rows])
    return [EndedEpisode(row.id, row.task_id, row.tags, row.ended_at_ms, rewards[row.id]) for row in rows]
