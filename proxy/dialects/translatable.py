"""Which Responses and Messages requests are translated, and what the engine's chat API is asked for them.

Pure. The prompt is never built here: it is the engine's own rendering of the agent's body (rendering.py).
What LiteLLM has made of the request is the base; what it drops or bends is put back from the agent's body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

DIALECTS = ("messages", "responses")

_ENGINE_RUN_TOOLS = ("code_interpreter", "container", "mcp", "web_search_preview")
"""vLLM runs these itself where it has a tool server: several generations in one call."""
_SHIMMED_TOOLS = ("custom", "namespace")
"""vLLM and LiteLLM turn these into functions in different ways."""
_MEDIA = ("audio", "document", "file", "image", "image_url", "input_audio", "input_file", "input_image")
_STATEFUL = ("background", "conversation", "previous_response_id", "prompt", "previous_input_messages")

_CARRIED = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "session_id",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
    "vllm_xargs",
)
"""What both dialects and the chat API of vLLM call by the same name: as the agent wrote it."""


def untranslatable(dialect: str, doc: Mapping[str, Any] | None) -> str | None:
    """Why a request goes to the engine as it is, without exact tokens. docs/dialects.md lists the reasons."""
    if doc is None:
        return "the body is not a JSON object"
    if doc.get("kv_transfer_params") is not None or doc.get("ec_transfer_params") is not None:
        return "kv_transfer_params"
    if dialect == "responses":
        reason = _untranslatable_response(doc)
        if reason is not None:
            return reason
    conversation = doc.get("messages" if dialect == "messages" else "input")
    return "images, audio or files" if _has_media(conversation) else None


def _untranslatable_response(doc: Mapping[str, Any]) -> str | None:
    include = doc.get("include")
    types = [tool.get("type") for tool in _dicts(doc.get("tools"))]
    choice = doc.get("tool_choice")
    last = _dicts(doc.get("input"))[-1:]
    reasons = {f"{name}: the engine's own memory": bool(doc.get(name)) for name in _STATEFUL} | {
        "logprobs in a response": bool(doc.get("top_logprobs"))
        or (isinstance(include, list) and "message.output_text.logprobs" in include),
        "include_reasoning=false": doc.get("include_reasoning") is False,
        "enable_response_messages": bool(doc.get("enable_response_messages")),
        "a tool that the engine may run itself": any(name in _ENGINE_RUN_TOOLS for name in types),
        "custom tools": any(name in _SHIMMED_TOOLS for name in types),
        "a tool_choice of another type than function": isinstance(choice, dict)
        and choice.get("type") != "function",
        "an unfinished message to be continued": bool(last)
        and last[0].get("status") in ("in_progress", "incomplete"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _has_media(value: Any) -> bool:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            return True
        # Arguments of a tool call are the agent's own business, whatever their `type` says.
        return any(_has_media(value[name]) for name in ("content", "output") if name in value)
    return isinstance(value, list) and any(_has_media(item) for item in value)


def chat_body(
    dialect: str, doc: Mapping[str, Any], translated: Mapping[str, Any], prompt_ids: list[int] | None
) -> bytes:
    """The chat request: what LiteLLM made of `doc`, with what it loses put back.

    `prompt_ids`: the engine's rendering of `doc`. vLLM then takes these ids as they are and templates
    nothing; None leaves the prompt to LiteLLM's messages.
    """
    body = dict(translated)
    body.pop("model", None)
    body.pop("reasoning_effort", None)
    if doc.get("model") is not None:
        body["model"] = doc["model"]
    body |= {name: doc[name] for name in _CARRIED if doc.get(name) is not None}
    tools = chat_tools(dialect, doc)
    if tools:
        body["tools"] = tools
    else:
        body.pop("tools", None)
        body.pop("tool_choice", None)
    effort = _reasoning_effort(dialect, doc)
    if effort is not None:
        body["reasoning_effort"] = effort
    if dialect == "messages":
        thinking = doc.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            body["thinking_token_budget"] = thinking.get("budget_tokens")
        if doc.get("stop_sequences"):
            body["stop"] = doc["stop_sequences"]
        wanted = _response_format(doc.get("output_config"))
        if wanted is not None:
            body["response_format"] = wanted
    if tools and _is_single_call(dialect, doc):
        body["parallel_tool_calls"] = False
    if prompt_ids is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": prompt_ids}
    return orjson.dumps(body)


def chat_tools(dialect: str, doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The agent's own tools, as vLLM gives them to its parsers; LiteLLM strips parts of them."""
    tools = []
    for tool in _dicts(doc.get("tools")):
        if dialect == "messages":
            function = {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            }
            function |= {name: tool[name] for name in ("strict", "defer_loading") if name in tool}
        elif tool.get("type") == "function":
            function = {name: value for name, value in tool.items() if name != "type"}
        else:
            continue  # vLLM shows no other kind to the model
        tools.append({"type": "function", "function": function})
    return tools


def _reasoning_effort(dialect: str, doc: Mapping[str, Any]) -> Any:
    if dialect == "responses":
        reasoning = doc.get("reasoning")
        return reasoning.get("effort") if isinstance(reasoning, dict) else None
    thinking = doc.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    output = doc.get("output_config")
    return output.get("effort") if isinstance(output, dict) else None


def _response_format(output: Any) -> dict[str, Any] | None:
    """Structured output of the Messages API, as vLLM reads it."""
    wanted = output.get("format") if isinstance(output, dict) else None
    schema = wanted.get("schema") or wanted.get("json_schema") if isinstance(wanted, dict) else None
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}


def _is_single_call(dialect: str, doc: Mapping[str, Any]) -> bool:
    if dialect == "responses":
        return doc.get("parallel_tool_calls") is False
    choice = doc.get("tool_choice")
    return isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
