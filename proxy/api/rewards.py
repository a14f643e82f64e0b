"""Rewards: append one. Nothing is ever overwritten; a later row may supersede an earlier one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ...records import Reward, RewardTarget, new_id, now_ms
from ...store.append import add_reward
from .context import Context, Name

router = APIRouter(prefix="/lightning/api/rewards", tags=["rewards"])


class NewReward(BaseModel):
    """What is rewarded follows from what is named: the episode, an agent in it, a call, tokens of a call."""

    model_config = ConfigDict(extra="forbid")

    episode: Name
    value: float = Field(allow_inf_nan=False)
    source: Name = "api"
    final: bool | None = Field(
        None, description="Whether it ends the episode; by default a reward about the whole episode does."
    )
    agent: Name | None = None
    call: str | None = None
    choice: int | None = Field(None, ge=0, le=2**31 - 1)
    token_start: int | None = Field(None, ge=0, le=2**31 - 1)
    token_end: int | None = Field(None, ge=0, le=2**31 - 1)
    note: str | None = None
    supersedes: str | None = None

    def target(self) -> RewardTarget:
        if self.token_start is not None or self.token_end is not None:
            return RewardTarget.TOKENS
        if self.call is not None:
            return RewardTarget.CALL
        return RewardTarget.EPISODE if self.agent is None else RewardTarget.AGENT


@router.post("")
async def add(new: NewReward, context: Context) -> dict[str, Any]:
    target = new.target()
    reward = Reward(
        id=new_id(),
        episode_id=new.episode,
        target=target,
        value=new.value,
        source=new.source,
        created_at_ms=now_ms(),
        agent=new.agent,
        call_id=new.call,
        choice_index=new.choice,
        token_start=new.token_start,
        token_end=new.token_end,
        final=target is RewardTarget.EPISODE if new.final is None else new.final,
        note=new.note,
        supersedes=new.supersedes,
    )
    await context.write(lambda conn: add_reward(conn, reward))
    if reward.final:
        context.live.end_episode(new.episode)
        context.engines.end_episode(new.episode)
        context.lineage.forget(new.episode)
    return {"reward": reward.id, "episode": new.episode, "target": target, "final": reward.final}
