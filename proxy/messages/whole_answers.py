"""An answer in one piece, read in slices, so that one of megabytes does not hold Python's lock for long.

Nearly all of an answer are the logprobs of its tokens, each a dictionary with the token's text and bytes.
They are cut out of the text and parsed slice by slice, with a pause after each. What is left of the text,
with a mark in place of each list, is parsed and undone as if it were the answer: for small ones, too, that
is cheaper. Slices and rest are valid JSON exactly if the whole is, and say the same. Where the text is not
in the form that is cut here, the whole is parsed at once. Knows nothing of what an answer means.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import orjson

from .splice import Edit, apply, parse

SLICE_BYTES = 24 * 1024
"""Parsed at once: less than a millisecond."""
SEARCH_BYTES = 1024 * 1024
PAUSE_SEC = 0.0003
"""Long enough for a thread that waits for the lock to take it; `sleep(0)` might take it back at once."""

# Keys with their bare quotes and colon can't be part of a string: what these find is structure.
_OPENS = b'"logprobs":{"content":['
_FIRST = b'{"token":"'
_CLOSES = b']},"finish_reason":'
_BETWEEN = re.compile(rb'(?:"top_logprobs":\[\]|\}\])\}(,)(?=\{"token":")')
_MARK = b"-1,"


class Tokens(NamedTuple):
    """Stands in a document for the list of its tokens' logprobs."""

    logprobs: list[float | None]


class _Cut(NamedTuple):
    """`text[start:end]`, the inside of a list, stands as `mark` in the short text."""

    start: int
    end: int
    mark: bytes
    logprobs: list[float | None]


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """`short` is `text` without the long lists; `doc` is what it says, with Tokens in their places."""

    text: bytes
    short: bytes
    doc: Any  # None: it is not JSON
    cuts: Sequence[_Cut]

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The text after edits that were found in the short one. None of them begins or ends in a list."""
        return apply(
            self.text, [Edit(self._before(edit.start), self._before(edit.end), edit.new) for edit in edits]
        )

    def _before(self, position: int) -> int:
        """Where a position of the short text lies in the whole."""
        shift = 0
        for cut in self.cuts:
            if position + shift <= cut.start:
                break
            shift += cut.end - cut.start - len(cut.mark)
        return position + shift


def short_pause() -> None:
    time.sleep(PAUSE_SEC)


def no_pause() -> None:
    pass


def read_answer(
    text: bytes, pause: Callable[[], None] = no_pause, slice_bytes: int = SLICE_BYTES
) -> WholeAnswer:
    """`pause` is called after every slice of work; one that lets others run belongs in a thread."""
    cuts = _cuts(text, pause, slice_bytes)
    if cuts:
        short = apply(text, [Edit(cut.start, cut.end, cut.mark) for cut in cuts])
        pause()
        doc = parse(short)
        pause()
        if short.count(b"[" + _MARK) == len(cuts) and _put_back(doc, cuts):
            return WholeAnswer(text, short, doc, cuts)
    return WholeAnswer(text, text, parse(text), ())


def _cuts(text: bytes, pause: Callable[[], None], slice_bytes: int) -> list[_Cut]:
    """All long lists; none where one of them is not as expected."""
    cuts: list[_Cut] = []
    position = 0
    while True:
        found = _find(text, _OPENS, position, pause)
        if found < 0:
            return cuts
        start = position = found + len(_OPENS)
        if not text.startswith(_FIRST, start):
            continue
        end = _find(text, _CLOSES, start, pause)
        if end < 0:
            return []
        try:
            values = _logprobs(text, start, end, pause, slice_bytes)
        except (orjson.JSONDecodeError, AttributeError):
            return []
        cuts.append(_Cut(start, end, _MARK + b"%d" % len(cuts), values))
        position = end


def _find(text: bytes, wanted: bytes, start: int, pause: Callable[[], None]) -> int:
    while start < len(text):
        found = text.find(wanted, start, start + SEARCH_BYTES + len(wanted) - 1)
        if found >= 0:
            return found
        start += SEARCH_BYTES
        pause()
    return -1


def _logprobs(
    text: bytes, start: int, end: int, pause: Callable[[], None], slice_bytes: int
) -> list[float | None]:
    slices: list[list[float | None]] = []
    while start < end:
        stop = end
        if end - start > 2 * slice_bytes:
            match = _BETWEEN.search(text, start + slice_bytes, end)
            stop = end if match is None else match.start(1)
        entries = orjson.loads(b"[" + text[start:stop] + b"]")
        slices.append([entry.get("logprob") for entry in entries])
        start = stop + 1
        del entries
        pause()
    return list(chain.from_iterable(slices))


def _put_back(doc: Any, cuts: Sequence[_Cut]) -> bool:
    """Exchange the marks in the document; False where one is not where logprobs are."""
    choices = doc.get("choices") if isinstance(doc, dict) else None
    num_found = 0
    for choice in choices if isinstance(choices, list) else ():
        given = choice.get("logprobs") if isinstance(choice, dict) else None
        if isinstance(given, dict) and num_found < len(cuts) and given.get("content") == [-1, num_found]:
            given["content"] = Tokens(cuts[num_found].logprobs)
            num_found += 1
    return num_found == len(cuts)


def unpacked(body: bytes, encoding: str) -> bytes:
    """A copy to read; empty where the encoding is not one that we know."""
    try:
        if encoding.lower() in ("gzip", "x-gzip", "deflate"):
            return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body)
    except zlib.error:
        pass
    return b""
