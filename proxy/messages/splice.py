"""Where in the bytes of a JSON text a value lies, and how to exchange it without touching another byte.

Knows JSON's grammar and nothing of what the texts mean. Order, spacing, number spelling and duplicate keys
stay as they were. The scanner expects a valid document (somebody has parsed it before).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import orjson

ANY = "*"
"""Stands for every element of an array in a path."""

Path = tuple[str, ...]

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]++', re.DOTALL)
_STRING_VALUE = rb'\s*:\s*("(?:[^"\\]++|\\.)*+")'


class Span(NamedTuple):
    """The value at `path` is `text[start:end]`."""

    path: Path
    start: int
    end: int


class Edit(NamedTuple):
    """Replace `text[start:end]` by `new`."""

    start: int
    end: int
    new: bytes


def locate(text: bytes, wanted: Collection[Path]) -> list[Span]:
    """Find every value at one of the `wanted` paths, duplicates included, by the position of their ends."""
    found: list[Span] = []
    open_containers: list[tuple[Path, Path, int, bool]] = []
    prefix: Path = ()
    label = ""
    in_object = False
    at_key = False
    for match in _TOKEN.finditer(text):
        start, end = match.span()
        first = text[start]
        if first == 0x3A:  # ":"
            at_key = False
        elif first == 0x2C:  # ","
            at_key = in_object
        elif first in (0x7D, 0x5D):  # "}" "]"
            path, prefix, opened_at, in_object = open_containers.pop()
            at_key = False
            if path in wanted:
                found.append(Span(path, opened_at, end))
        elif at_key:
            label = _key(text[start:end])
        else:
            path = (*prefix, label if in_object else ANY) if open_containers else ()
            if first in (0x7B, 0x5B):  # "{" "["
                open_containers.append((path, prefix, start, in_object))
                prefix = path
                in_object = at_key = first == 0x7B
            elif path in wanted:
                found.append(Span(path, start, end))
    return found


def parse(text: bytes) -> Any:
    """The document; None where it is not JSON. Also with numbers beyond a float's range."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        doc = json.loads(text, parse_int=_number)
        orjson.dumps(doc)  # what can't be written into the log is not read either
    except (ValueError, TypeError, RecursionError):
        return None
    return doc


def _number(text: str) -> int | float:
    """As orjson reads it: a float where 64 bits do not hold it."""
    value = int(text)
    return value if -(2**63) <= value < 2**64 else float(text)


def _key(token: bytes) -> str:
    return str(json.loads(token)) if b"\\" in token else token[1:-1].decode()  # it takes half characters


def apply(text: bytes, edits: Sequence[Edit]) -> bytes:
    """Carry out edits that do not overlap."""
    if not edits:
        return text
    pieces: list[bytes] = []
    position = 0
    for edit in sorted(edits):
        pieces += (text[position : edit.start], edit.new)
        position = edit.end
    pieces.append(text[position:])
    return b"".join(pieces)


def set_members(text: bytes, members: Sequence[tuple[str, bytes]], present: Collection[str]) -> bytes:
    """Set members of the top-level object to JSON values: in place where `present`, else at its end.

    Of duplicate keys the last one counts, for the engine too, so that is the one to exchange.
    """
    edits: list[Edit] = []
    added: list[bytes] = []
    in_place = {name: value for name, value in members if name in present}
    if in_place:
        last = {span.path[0]: span for span in locate(text, {(name,) for name in in_place})}
        edits = [Edit(span.start, span.end, in_place[name]) for name, span in last.items()]
    for name, value in members:
        if name not in present:
            added.append(orjson.dumps(name) + b":" + value)
    if added:
        close = text.rindex(b"}")
        is_empty = text[:close].rstrip().endswith(b"{") and not present
        edits.append(Edit(close, close, (b"" if is_empty else b",") + b",".join(added)))
    return apply(text, edits)


def only_string_member(text: bytes, name: bytes) -> tuple[int, int] | None:
    """The span of a string value whose key occurs once in the whole text, at whatever depth; else None.

    A key with its quotes and colon can't be part of a string (there its quotes are escaped), so one
    occurrence is the occurrence that a parser has seen.
    """
    key = b'"' + name + b'"'
    if text.count(key) != 1:
        return None
    match = re.compile(re.escape(key) + _STRING_VALUE, re.DOTALL).search(text)
    return match.span(1) if match else None
