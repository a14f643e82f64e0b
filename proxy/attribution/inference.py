"""Whose call it is where no mark says so: by trace, or by the conversation that it goes on. Opt-ins.

A trace id may stand for a job, or for a single call; a conversation may be carried on by another agent. So
neither is asked unless somebody has switched it on, and never against a mark. Conversations are known by
hashes of their messages, in this process's memory; what two episodes share is ambiguous, and ambiguous means
unattributed.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from ...records import Attribution, CallEnd, new_id
from ..transport.headers import Headers

MAX_KNOWN = 65_536

AMBIGUOUS = "prefix: calls of several episodes, or of none, begin like this one"

_TRACE = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Inference:
    """`infer` when a call comes, `learn` when its answer is there. On the event loop."""

    def __init__(self, *, by_trace: bool, by_prefix: bool) -> None:
        self._by_trace = by_trace
        self._by_prefix = by_prefix
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """Hash of a call's messages and its answer -> its episode; None: of several episodes, or of none."""

    def infer(self, found: Attribution, headers: Headers, doc: Mapping[str, Any] | None) -> Attribution:
        """`found` has no episode. With one, where there is exactly one that it can be."""
        if self._by_trace:
            trace = trace_id(headers)
            if trace is not None:
                return replace(found, episode_id=f"trace-{trace}", rule="traceparent")
        messages = _messages(doc)
        if not self._by_prefix or messages is None:
            return found
        try:
            prefixes, _ = _hashes(messages)
        except orjson.JSONEncodeError:  # nested deeper than it writes, if not than it reads
            return found
        for prefix in reversed(prefixes[:-1]):
            if prefix in self._known:
                episode = self._known[prefix]
                if episode is None:
                    said = AMBIGUOUS if found.conflict is None else f"{found.conflict}; {AMBIGUOUS}"
                    return replace(found, conflict=said)
                return replace(found, episode_id=episode, rule="prefix")
        # It goes on from nothing that is known: a conversation of its own begins.
        return replace(found, episode_id=f"conversation-{new_id()}", rule="prefix")

    def learn(self, episode_id: str | None, doc: Mapping[str, Any] | None, end: CallEnd) -> None:
        """What a next call of this conversation will begin with."""
        messages = _messages(doc)
        if not self._by_prefix or messages is None:
            return
        try:
            _, running = _hashes(messages)
        except orjson.JSONEncodeError:
            return
        for choice in end.choices:
            if choice.message is None:
                continue
            extended = running.copy()
            extended.update(_canonical({"role": "assistant", **choice.message}))
            name = extended.digest()
            had = self._known.pop(name, episode_id)
            self._known[name] = episode_id if had == episode_id else None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


def trace_id(headers: Headers) -> str | None:
    """Of the one `traceparent` header; None where there is none, or none that is valid."""
    given = [value for name, value in headers if name == b"traceparent"]
    match = _TRACE.fullmatch(given[0].strip()) if len(given) == 1 else None
    return None if match is None else match.group(1).decode()


def _messages(doc: Mapping[str, Any] | None) -> list[Any] | None:
    messages = doc.get("messages") if doc is not None else None
    return messages if isinstance(messages, list) and messages else None


def _hashes(messages: Sequence[Any]) -> tuple[list[bytes], hashlib.blake2b]:
    """After each message; and the running one, to go on with."""
    running = hashlib.blake2b(digest_size=16)
    found: list[bytes] = []
    for message in messages:
        running.update(_canonical(message))
        found.append(running.digest())
    return found, running


def _canonical(message: Any) -> bytes:
    """What stays of a message when an agent sends it back: role, text and tool calls, not their spelling."""
    if not isinstance(message, Mapping):
        return orjson.dumps(message) + b"\n"
    calls = message.get("tool_calls")
    kept = [
        message.get("role"),
        _text(message.get("content")),
        [_call(call) for call in calls] if isinstance(calls, list) else [],
        message.get("tool_call_id"),
    ]
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS) + b"\n"


def _text(content: Any) -> Any:
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and "text" in part]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "".join(texts)
    return content.strip() if isinstance(content, str) else content or ""


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments: Any = function.get("arguments")
    try:
        return [function.get("name"), orjson.loads(arguments)]
    except (orjson.JSONDecodeError, TypeError):
        return [function.get("name"), arguments]
