"""Short ways to make log entries in tests: everything has a default, name only what the test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.records import (
    Attribution,
    CallEnd,
    CallIntent,
    CallKind,
    CallStatus,
    RecordedChoice,
    Reward,
    RewardTarget,
    logprobs,
    new_id,
    now_ms,
    token_ids,
)

BODY = b'{"model": "gpt-4o", "messages": [{"role": "user", "content": "1 + 1?"}]}'


def intent(
    call: str,
    episode: str | None = "ep",
    *,
    task: str | None = None,
    batch: str | None = None,
    agent: str | None = None,
    tags: Mapping[str, str] | None = None,
    conflict: str | None = None,
    body: bytes = BODY,
    policy: str | None = "policy",
    version: int | None = 0,
    sampling: Mapping[str, Any] | None = None,
    **changes: Any,
) -> CallIntent:
    values: dict[str, Any] = {
        "id": call,
        "attribution": Attribution(episode, task, batch, agent, tags or {}, "header", conflict),
        "kind": CallKind.POLICY,
        "route": "/v1/chat/completions",
        "dialect": "chat",
        "streaming": False,
        "requested_model": "gpt-4o",
        "served_model": "base",
        "policy": policy,
        "policy_version": version,
        "engine_url": "http://engine",
        "fingerprint_id": None,
        "sampling": {"temperature": 1.0} if sampling is None else sampling,
        "request_body": body,
        "request_hash": None,
        "state_key": None,
        "parent_call_id": None,
        "unrecordable": None,
        "idempotency_key": None,
        "retry_count": 0,
        "started_at_ms": now_ms(),
    }
    return CallIntent(**{**values, **changes})


def choice(
    ids: Sequence[int] = (7, 8), values: Sequence[float] = (-0.5, -0.25), index: int = 0, **changes: Any
) -> RecordedChoice:
    fields: dict[str, Any] = {
        "index": index,
        "completion_ids": token_ids(ids),
        "behavior_logprobs": logprobs(values),
        "finish_reason": "stop",
        "stop_reason": None,
        "message": {"role": "assistant", "content": "2"},
        "quarantine": None,
    }
    return RecordedChoice(**{**fields, **changes})


def end(
    call: str, prompt: Sequence[int] | None = (1, 2, 3), *choices: RecordedChoice, **changes: Any
) -> CallEnd:
    fields: dict[str, Any] = {
        "call_id": call,
        "status": CallStatus.COMPLETE,
        "http_status": 200,
        "upstream_id": f"chatcmpl-{call}",
        "prompt_ids": None if prompt is None else token_ids(prompt),
        "choices": choices or (choice(),),
        "policy_version_end": 0,
        "reported_completion_tokens": None,
        "error": None,
        "first_byte_at_ms": now_ms(),
        "ended_at_ms": now_ms(),
    }
    return CallEnd(**{**fields, **changes})


def reward(episode: str = "ep", value: float = 1.0, source: str = "test", **changes: Any) -> Reward:
    fields: dict[str, Any] = {
        "id": new_id(),
        "episode_id": episode,
        "target": RewardTarget.EPISODE,
        "value": value,
        "source": source,
        "created_at_ms": now_ms(),
    }
    return Reward(**{**fields, **changes})
