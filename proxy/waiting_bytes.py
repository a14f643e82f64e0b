"""How much memory an entry holds while it waits to be written: roughly, and at the price of a few look-ups.

On the hot path, so nothing is serialised and no text is looked into. Knows nothing of queues.
"""

from __future__ import annotations

from sys import getsizeof
from typing import Any

from ..records import CallEnd, CallIntent, LogEntry

_TOKEN_BYTES = 8  # an id and its logprob
_MAX_DEPTH = 4
"""Of a text in a message: `tool_calls`, one of them, `function`, `arguments`. Deeper ones are not counted."""


def waiting_bytes(entry: LogEntry) -> int:
    if isinstance(entry, CallIntent):
        return len(entry.request_body)
    if not isinstance(entry, CallEnd):
        return 0
    num_tokens = 0 if entry.prompt_ids is None else len(entry.prompt_ids)
    texts = 0 if entry.error is None else getsizeof(entry.error)
    for choice in entry.choices:
        if choice.completion_ids is not None:
            num_tokens += len(choice.completion_ids)
        texts += _text_bytes(choice.message, _MAX_DEPTH)
    return _TOKEN_BYTES * num_tokens + texts


def _text_bytes(value: Any, depth: int) -> int:
    """`value` as JSON is read: no subclasses."""
    kind = type(value)
    if kind is str:
        return getsizeof(value)
    if depth == 0 or (kind is not dict and kind is not list):
        return 0
    size = 0
    for item in value.values() if kind is dict else value:
        if item is not None:
            size += _text_bytes(item, depth - 1)
    return size
