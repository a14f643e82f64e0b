"""How the episodes of one policy version went: what a canary is judged by."""

from __future__ import annotations

import sqlalchemy as sa

from ..records import EpisodeStatus, Purpose, RewardTarget
from .read import load_rewards
from .rewards import resolve
from .schema import calls, episodes, rewards

_rewarded = sa.exists().where(
    rewards.c.episode_id == episodes.c.id, rewards.c.target == RewardTarget.EPISODE.value
)


def outcomes(conn: sa.Connection, policy: str, version: int, *, since_ms: int = 0, limit: int) -> list[float]:
    """The resolved rewards of the episodes that ended last, at most `limit`, since then, with a reward, and
    were served by this version alone, as far as it is the policy's calls.

    When a row was made says nothing: an episode may be announced long before its first call, which is what
    gives it a version.
    """
    of_policy = sa.and_(calls.c.episode_id == episodes.c.id, calls.c.policy == policy)
    query = (
        sa.select(episodes.c.id)
        .where(
            episodes.c.status == EpisodeStatus.ENDED.value,
            episodes.c.purpose == Purpose.TRAIN.value,
            episodes.c.ended_at_ms >= since_ms,
            sa.exists().where(of_policy, calls.c.policy_version == version),
            sa.not_(sa.exists().where(of_policy, calls.c.policy_version != version)),
            _rewarded,
        )
        .order_by(episodes.c.ended_at_ms.desc(), episodes.c.id.desc())
        .limit(limit)
    )
    found = load_rewards(conn, conn.execute(query).scalars())
    values = (resolve(rows).value for rows in found.values())
    return [value for value in values if value is not None]
