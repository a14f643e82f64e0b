"""Episodes: announce one, issue a key for its calls, end one, look at one."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from ...records import Call, Episode, EpisodeStatus, Purpose, Reward, new_id, now_ms
from ...store.append import create_episode, end_episode
from ...store.keys import EpisodeKey, add_episode_key
from ...store.read import load_episodes
from ...store.rewards import resolve
from ..attribution.keys import key_hash, new_key
from .context import Context, Name
from .curation import TagKey

router = APIRouter(prefix="/lightning/api/episodes", tags=["episodes"])


class NewEpisode(BaseModel):
    """An episode to come. Announcing is optional: the first call that names an episode creates it."""

    model_config = ConfigDict(extra="forbid")

    episode: Name | None = Field(None, description="Made up if left out.")
    task: Name | None = None
    batch: Name | None = None
    expected_size: int | None = Field(None, ge=1, le=2**31 - 1, description="Episodes in the group.")
    purpose: Purpose = Purpose.TRAIN
    tags: dict[TagKey, str] = Field(default_factory=dict)


class EpisodeEnd(BaseModel):
    """How it ended."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["ended", "failed", "excluded"] = "ended"
    note: str | None = None


@router.post("")
async def announce(new: NewEpisode, request: Request, context: Context) -> dict[str, str]:
    episode = new.episode or new_id()
    await context.write(
        lambda conn: create_episode(
            conn,
            episode_id=episode,
            task_id=new.task,
            batch=new.batch,
            expected_size=new.expected_size,
            purpose=new.purpose,
            tags=new.tags,
        )
    )
    root = str(request.base_url).rstrip("/")
    return {"episode": episode, "base_url": f"{root}/episodes/{quote(episode, safe='')}/v1"}


@router.post("/{episode:path}/end")
async def end(episode: str, context: Context, body: EpisodeEnd | None = None) -> dict[str, str]:
    how = body or EpisodeEnd()
    status = EpisodeStatus(how.status)
    await context.write(lambda conn: end_episode(conn, episode, status=status, by="api", note=how.note))
    context.live.end_episode(episode)
    context.engines.end_episode(episode)
    context.lineage.forget(episode)
    return {"episode": episode, "status": status.value}


class NewKey(BaseModel):
    """A key to use as the agent's API key: its calls are this episode's, and this agent's."""

    model_config = ConfigDict(extra="forbid")

    agent: Name | None = None
    expires_in_sec: int | None = Field(
        24 * 3600, ge=1, le=10 * 365 * 24 * 3600, description="null: it never does."
    )


@router.post("/{episode:path}/keys")
async def issue_key(episode: str, context: Context, body: NewKey | None = None) -> dict[str, Any]:
    wanted = body or NewKey()
    lifetime = wanted.expires_in_sec
    expires_at_ms = None if lifetime is None else now_ms() + 1000 * lifetime
    key = new_key()
    stored = EpisodeKey(episode, wanted.agent, expires_at_ms)
    await context.write(lambda conn: add_episode_key(conn, key_hash(key.encode()), stored))
    return {"key": key, "episode": episode, "agent": wanted.agent, "expires_at_ms": expires_at_ms}


@router.get("/{episode:path}")
async def show(episode: str, context: Context) -> dict[str, Any]:
    found = await context.read(lambda conn: load_episodes(conn, [episode])[0])
    return _episode_doc(found)


def _episode_doc(episode: Episode) -> dict[str, Any]:
    resolution = resolve(episode.rewards)
    return {
        "episode": episode.id,
        "task": episode.task_id,
        "group": episode.group_id,
        "purpose": episode.purpose,
        "status": episode.status,
        "tags": dict(episode.tags),
        "created_at_ms": episode.created_at_ms,
        "ended_at_ms": episode.ended_at_ms,
        "has_gap": episode.has_gap,
        "reward": resolution.value,
        "reward_path": resolution.path,
        "rewards": [_reward_doc(reward) for reward in episode.rewards],
        "calls": [_call_doc(call) for call in episode.calls],
    }


def _reward_doc(reward: Reward) -> dict[str, Any]:
    return {
        "reward": reward.id,
        "target": reward.target,
        "value": reward.value,
        "source": reward.source,
        "final": reward.final,
        "agent": reward.agent,
        "call": reward.call_id,
        "choice": reward.choice_index,
        "token_start": reward.token_start,
        "token_end": reward.token_end,
        "note": reward.note,
        "supersedes": reward.supersedes,
        "created_at_ms": reward.created_at_ms,
    }


def _call_doc(call: Call) -> dict[str, Any]:
    return {
        "call": call.id,
        "ordinal": call.ordinal,
        "agent": call.agent,
        "kind": call.kind,
        "status": call.status,
        "delivered": call.delivered,
        "parent": call.parent_call_id,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "num_prompt_tokens": len(call.prompt_ids),
        "choices": [
            {
                "choice": choice.index,
                "num_tokens": len(choice.completion_ids),
                "finish_reason": choice.finish_reason,
                "quarantine": choice.quarantine,
            }
            for choice in call.choices
        ],
    }
