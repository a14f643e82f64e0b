"""Which call a call follows from, and the state that it was made in.

Best effort, in this process's memory: the parent is the call of the same episode whose messages are the
longest proper prefix of this one's. The state is what step-level credit compares calls by: what was observed
since the last answer. Knows message texts as hashes only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson

MAX_EPISODES = 4096
MAX_CALLS_PER_EPISODE = 1024
MAX_CALLS = 262_144  # of all episodes together, about 50 MB


class Lineage:
    """The calls of the episodes that were active last."""

    def __init__(self, max_episodes: int = MAX_EPISODES, max_calls: int = MAX_CALLS) -> None:
        self._max_episodes = max_episodes
        self._max_calls = max_calls
        self._num_calls = 0
        self._episodes: OrderedDict[str, dict[bytes, str]] = OrderedDict()  # episode -> messages -> call

    def place(
        self, episode_id: str | None, call_id: str, doc: Mapping[str, Any] | None
    ) -> tuple[str | None, str | None]:
        """Remember a call; give its parent's id and its state key, each None where there is none."""
        try:
            return self._place(episode_id, call_id, doc)
        except orjson.JSONEncodeError:  # nested deeper than it writes, if not than it reads
            return None, None

    def _place(
        self, episode_id: str | None, call_id: str, doc: Mapping[str, Any] | None
    ) -> tuple[str | None, str | None]:
        messages = doc.get("messages") if doc is not None else None
        if not isinstance(messages, list) or not messages:
            return None, _state_key(doc.get("prompt") if doc is not None else None)
        prefixes, state_key = _hashes(messages)
        if episode_id is None:
            return None, state_key
        calls = self._episodes.get(episode_id)
        if calls is None:
            calls = self._episodes[episode_id] = {}
            if len(self._episodes) > self._max_episodes:
                self.forget(next(iter(self._episodes)))
        else:
            self._episodes.move_to_end(episode_id)
        parent = next((calls[prefix] for prefix in reversed(prefixes[:-1]) if prefix in calls), None)
        if len(calls) >= MAX_CALLS_PER_EPISODE:
            del calls[next(iter(calls))]
            self._num_calls -= 1
        self._num_calls += prefixes[-1] not in calls
        calls[prefixes[-1]] = call_id
        while self._num_calls > self._max_calls and len(self._episodes) > 1:
            self.forget(next(iter(self._episodes)))
        return parent, state_key

    def forget(self, episode_id: str) -> None:
        self._num_calls -= len(self._episodes.pop(episode_id, ()))


_AT_ONCE_BYTES = (
    2047  # hashlib gives Python's lock away for more, and the event loop would wait to get it back
)
_LONG_BYTES = 64 * 1024  # from here on the hash takes longer than that


def digest(text: bytes) -> bytes:
    """blake2b-128."""
    running = hashlib.blake2b(digest_size=16)
    _update(running, text)
    return running.digest()


def _update(running: hashlib.blake2b, text: bytes) -> None:
    if len(text) <= _AT_ONCE_BYTES or len(text) >= _LONG_BYTES:
        running.update(text)
        return
    view = memoryview(text)
    for start in range(0, len(text), _AT_ONCE_BYTES):
        running.update(view[start : start + _AT_ONCE_BYTES])


def _hashes(messages: list[Any]) -> tuple[list[bytes], str]:
    """A running hash after each message, and the state: what was observed since the last answer.

    That is the messages behind the last one of the assistant; instructions (system, developer) are left out
    unless nothing else is there, and so are the ids of tool calls, which no two episodes share.
    """
    running = hashlib.blake2b(digest_size=16)
    prefixes: list[bytes] = []
    observed: list[bytes] = []
    told: list[bytes] = []
    for message in messages:
        text = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
        running.update(b"%d:" % len(text))
        _update(running, text)
        prefixes.append(running.digest())
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            observed, told = [], [text]
        elif role in ("system", "developer"):
            told.append(text)
        else:
            bare = _without_ids(message)
            observed.append(text if bare is message else orjson.dumps(bare, option=orjson.OPT_SORT_KEYS))
    state = hashlib.blake2b(digest_size=16)
    for text in observed or told:
        state.update(b"%d:" % len(text))
        _update(state, text)
    return prefixes, state.hexdigest()


_IDS = frozenset({"id", "tool_call_id", "tool_use_id", "call_id"})


def _without_ids(message: Any) -> Any:
    """The message itself where it, and the parts of its content, name no id."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not any(isinstance(item, dict) and not _IDS.isdisjoint(item) for item in (message, *parts)):
        return message
    bare = {key: value for key, value in message.items() if key not in _IDS}
    if isinstance(content, list):
        bare["content"] = [
            {key: value for key, value in part.items() if key not in _IDS} if isinstance(part, dict) else part
            for part in content
        ]
    return bare


def _state_key(prompt: Any) -> str | None:
    if prompt is None:
        return None
    return digest(orjson.dumps(prompt)).hex()
