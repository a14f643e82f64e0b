"""The quick way through a stream: chunks of one token in the very form in which vLLM writes them.

Nearly all chunks of a long answer are such. One look at the bytes (a match of the whole event, to its last
byte) gives what is recorded and what the agent is to see. What that is, inject.py says: its word for the
first such chunk of a stream holds for the others. Where it says something else than expected, or where a
chunk looks any different, it is left to the slow way. Knows nothing of how an answer is put together.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+"'
_SOME_TEXT = _STRING.replace(b"*+", b"++")
_NUMBER = rb"-?\d++(?:\.\d++)?+(?:[eE][-+]?\d++)?+"
_HEAD = re.compile(
    rb'data: \{"id":%b,"object":"chat\.completion\.chunk","created":\d++,"model":%b,'
    rb'"choices":\[\{"index":0,"delta":\{"(content|reasoning|reasoning_content)":' % (_STRING, _STRING)
)
_REST = re.compile(
    rb'(%b)\},"logprobs":\{"content":\[\{"token":%b,"logprob":(%b),"bytes":\[[\d,]*+\],"top_logprobs":\[\]\}\]\},'
    rb'"finish_reason":null,"token_ids":\[(\d++)\]\}\]\}\n\n' % (_SOME_TEXT, _STRING, _NUMBER)
)
_REST_SEEN = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


class PlainChunks:
    """Those of one stream. `texts`, `logprobs` and `ids` are JSON texts, of the chunks since `clear`.

    The texts are all of `field`: a chunk of another field is left to the slow way, which clears.
    """

    __slots__ = ("_head", "_is_off", "_seen_head", "_undo", "field", "ids", "logprobs", "texts")

    def __init__(self, undo: Callable[[bytes], bytes]) -> None:
        self._undo = undo
        self._head = self._seen_head = b"\n"  # how no event begins
        self._is_off = False
        self.field = ""
        self.texts: list[bytes] = []
        self.logprobs: list[bytes] = []
        self.ids: list[bytes] = []

    def take(self, block: bytes) -> bytes | None:
        """What the agent sees of an event, if it is a plain chunk; None, and nothing taken, if it is not."""
        head = self._head
        match = _REST.fullmatch(block, len(head)) if block.startswith(head) else None
        if match is None:
            self._look_at(block)
            return None
        text, logprob, token = match.groups()
        self.texts.append(text)
        self.logprobs.append(logprob)
        self.ids.append(token)
        return self._seen_head + text + _REST_SEEN

    def clear(self) -> None:
        self.texts.clear()
        self.logprobs.clear()
        self.ids.clear()

    def _look_at(self, block: bytes) -> None:
        """From the first plain chunk: how they begin, and how they begin for the agent."""
        if b"\r" in block:  # what may begin the next event depends on how this one was undone
            self._is_off, self._head = True, b"\n"
        if self._is_off or self.ids:
            return
        match = _HEAD.match(block)
        rest = None if match is None else _REST.fullmatch(block, match.end())
        if match is None or rest is None:
            return
        seen, end = self._undo(block), rest.group(1) + _REST_SEEN
        if not seen.endswith(end):
            self._is_off = True  # the agent asked for logprobs or ids itself
            return
        self._head, self._seen_head = match.group(), seen.removesuffix(end)
        self.field = match.group(1).decode()
