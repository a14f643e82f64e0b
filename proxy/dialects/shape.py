"""LiteLLM's answers, straightened to what the official SDKs and the engine's own answers look like.

Pure. One id for the whole answer, the model's name as the agent wrote it, the request echoed as it was, usage
with all its parts, a status that says why a response is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "store": False,
    "temperature": 1.0,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What a response repeats of its request, and what it says where the request was silent."""

_NOT_OURS = ("cost", "async_", "allowed_callers", "caller", "output_schema")


@dataclass(frozen=True, slots=True)
class Shown:
    """What every event of one answer says alike."""

    answer_id: str
    model: str | None  # None: the agent named none, what the engine says stays
    request: Mapping[str, Any]


def message(doc: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """A whole Messages answer."""
    shaped = {**doc, "id": shown.answer_id, "model": shown.model or doc.get("model")}
    shaped.pop("stop_details", None)
    shaped.setdefault("stop_sequence", None)
    if not shaped.get("content"):
        shaped["content"] = [{"type": "text", "text": ""}]  # clients rely on a first block
    return shaped


def message_event(doc: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """One event of a Messages stream."""
    shaped = dict(doc)
    if shaped.get("type") == "message_start":
        shaped["message"] = {**shaped["message"], "id": shown.answer_id}
        shaped["message"]["model"] = shown.model or shaped["message"].get("model")
    elif shaped.get("type") == "message_delta":
        shaped["delta"] = {"stop_sequence": None, **shaped["delta"]}
    return shaped


def response(doc: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """A whole Responses answer, as it is or inside an event."""
    shaped = {name: value for name, value in doc.items() if name not in _NOT_OURS}
    shaped["id"] = shown.answer_id
    shaped["model"] = shown.model or doc.get("model")
    for name, silent in _ECHOED.items():
        given = shown.request.get(name)
        shaped[name] = silent if given is None else given
    shaped["store"] = False  # the proxy keeps no responses to be referred to
    items = [output_item(item) for item in doc.get("output") or []]
    # LiteLLM puts an empty message before a tool call, where the engine puts none.
    shaped["output"] = [item for item in items if not _is_silent(item)] or items
    if isinstance(doc.get("usage"), dict):
        shaped["usage"] = _usage(doc["usage"])
    if shaped.get("status") == "incomplete" and not shaped.get("incomplete_details"):
        shaped["incomplete_details"] = {"reason": "max_output_tokens"}
    return shaped


def response_event(doc: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """One event of a Responses stream."""
    shaped = dict(doc)
    if isinstance(shaped.get("item"), dict):
        shaped["item"] = output_item(shaped["item"])
    if isinstance(shaped.get("response"), dict):
        shaped["response"] = response(shaped["response"], shown)
        if shaped["type"] == "response.incomplete":
            shaped["type"] = "response.completed"  # vLLM's word; the Agents SDK raises at the other
    if shaped.get("type") in ("response.output_text.delta", "response.output_text.done"):
        shaped["logprobs"] = shaped.get("logprobs") or []
    if shaped.get("type") == "response.function_call_arguments.done":
        shaped.setdefault("name", "")
    return shaped


def output_item(item: Mapping[str, Any]) -> dict[str, Any]:
    shaped = {name: value for name, value in item.items() if name not in _NOT_OURS}
    if shaped.get("namespace") is None:
        shaped.pop("namespace", None)
    return shaped


def _is_silent(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "message" and not any(
        part.get("text") or part.get("type") != "output_text" for part in item.get("content") or []
    )


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    inputs, outputs = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    return {
        "input_tokens": usage.get("input_tokens", 0),
        "input_tokens_details": {
            "cached_tokens": (inputs or {}).get("cached_tokens") or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.get("output_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": (outputs or {}).get("reasoning_tokens") or 0},
        "total_tokens": usage.get("total_tokens", 0),
    }
