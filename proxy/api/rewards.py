"""Rewards: append one or many, and what those of an episode come to.

Nothing is ever overwritten; a later row may supersede an earlier one.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...errors import UserError
from ...records import Reward
from ...store.append import add_reward
from ...store.reward_lines import NumberedReward, RewardLine, read_lines
from ...store.reward_rows import import_rewards, rewards_of
from ...store.reward_view import view_rewards
from .context import ApiContext, Context, Name

router = APIRouter(prefix="/lightning/api/rewards", tags=["rewards"])

DEFAULT_SOURCE = "api"


class NewReward(RewardLine):
    """What is rewarded follows from what is named: the episode, an agent in it, a call, tokens of a call."""

    episode: Name
    source: Name = DEFAULT_SOURCE
    agent: Name | None = None


@router.post("")
async def add(new: NewReward, context: Context) -> dict[str, Any]:
    reward = new.reward(DEFAULT_SOURCE)
    if new.id is None:
        await context.write(lambda conn: add_reward(conn, reward))
    else:  # given again under its id it must say the same
        await context.write(lambda conn: import_rewards(conn, [NumberedReward(None, reward)]))
    _end_episodes(context, [reward])
    return {
        "reward": reward.id,
        "episode": new.episode,
        "target": reward.target,
        "final": reward.final,
    }


@router.post("/import")
async def add_many(request: Request, context: Context) -> dict[str, int]:
    """A body of JSON lines, one reward each: all are written, or none and the first wrong line is named."""
    try:
        text = (await request.body()).decode()
    except UnicodeDecodeError:
        raise UserError("the body is no UTF-8 text; send one JSON object per line") from None
    numbered = read_lines(text.splitlines(), DEFAULT_SOURCE)
    found = await context.write(lambda conn: import_rewards(conn, numbered))
    _end_episodes(context, [item.reward for item in numbered])
    return {"added": found.added, "known": found.known}


@router.get("/{episode:path}")
async def show(episode: str, context: Context) -> dict[str, Any]:
    """The resolved value and its path, all sources weighing the same, and what became of every row."""
    rows = await context.read(lambda conn: rewards_of(conn, episode))
    return view_rewards(episode, rows, {}).as_json()


def _end_episodes(context: ApiContext, rewards: list[Reward]) -> None:
    for name in {reward.episode_id for reward in rewards if reward.final}:
        context.live.end_episode(name)
        context.engines.end_episode(name)
        context.lineage.forget(name)
