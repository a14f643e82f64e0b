"""Chat messages as far as they have to be compared: their text, their thinking, their tool calls. Pure.

Takes messages as agents and engines write them: contents that are text or lists of parts, tool calls whose
arguments are JSON in a string, thinking under several names or between tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]

_THINKING_KEYS = ("reasoning", "reasoning_content", "thinking")
_THOUGHT = re.compile(r"^.*?</think>|<think>.*?</think>|<think>.*$", re.S)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`raw`: the arguments as written; `arguments` and `keys`: what they say, and in which order."""

    name: str | None
    raw: str
    arguments: Any
    keys: tuple[str, ...]


def messages_of(doc: Any) -> tuple[Message, ...] | None:
    """Of a request in any dialect that has a list of them; instructions that stand beside it come first."""
    if not isinstance(doc, dict):
        return None
    listed = doc.get("messages", doc.get("input"))
    if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
        return None
    beside = doc.get("system", doc.get("instructions"))
    head = [{"role": "system", "content": beside}] if beside else []
    return tuple(head + listed)


def same(one: Message, other: Message) -> bool:
    """Equal but for what is null or empty, and for a text that is written as a single part."""
    return _exact(one) == _exact(other)


def loose(message: Message) -> tuple[Any, ...]:
    """What the message says: thinking, spaces and the form of JSON left out."""
    content = message.get("content")
    parts = None if isinstance(content, str) or _is_text_only(content) else content
    said = " ".join(_THOUGHT.sub("", text_of(message)).split())
    calls = tuple((call.name, json.dumps(call.arguments, sort_keys=True)) for call in tool_calls_of(message))
    other = json.dumps(parts, sort_keys=True) if parts else ""
    return message.get("role"), said, calls, message.get("tool_call_id"), other


def text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if _is_text(part))
    return ""


def has_thinking(message: Message) -> bool:
    if any(message.get(key) for key in _THINKING_KEYS):
        return True
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and part.get("type") == "thinking" for part in content)
    return "</think>" in text_of(message)


def tool_calls_of(message: Message) -> tuple[ToolCall, ...]:
    listed = message.get("tool_calls")
    return tuple(_tool_call(call) for call in listed) if isinstance(listed, list) else ()


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    written = function.get("arguments")
    raw = written if isinstance(written, str) else json.dumps(written)
    try:
        arguments = json.loads(raw)
    except ValueError:
        arguments = raw
    keys = tuple(arguments) if isinstance(arguments, dict) else ()
    return ToolCall(function.get("name"), raw, arguments, keys)


def _exact(message: Message) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value not in (None, [], {}, "")}
    if _is_text_only(kept.get("content")):
        kept["content"] = text_of(message)
    return kept


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _is_text_only(content: Any) -> bool:
    return isinstance(content, list) and all(_is_text(part) for part in content)
