"""Request bodies as a skeleton and content-addressed parts, and small JSON as bytes.

An agent repeats its whole conversation in every call. The messages and tools of a body are cut out of its
text, byte for byte, and stored once under their hash; the skeleton keeps everything between them. Putting a
body together again gives the very bytes that the agent sent. Knows nothing of calls or of what a message
means.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from ..errors import StoreError
from .schema import body_parts
from .statements import chunks, existing, insert_missing

_SPLIT_LISTS = frozenset({"messages", "input", "system", "content", "contents"})  # one part per element
_SPLIT_WHOLE = frozenset({"tools", "functions", "response_format", "system", "instructions"})  # one part
_MIN_PART_BYTES = 96  # below this a row of its own costs more than the bytes that it saves
_HASH_BYTES = 16
_RAW, _PACKED = b"\x00", b"\x01"  # first byte of a skeleton: whether the rest is compressed
_SMALL_BYTES = 1024
"""Below this, compressing costs more than it saves: a call's time, and a turn at Python's lock."""
_LEVEL = 3
_ZLIB = b"x"  # how compressed bytes begin, and no JSON value does

# At least so long that it is stored compressed: uncompressed parts must not begin as compressed ones do.
_BIG_BYTES = 4096
_BIG_STRING = re.compile(rb'"((?:data:[^",]{0,200},)?[A-Za-z0-9+/=_\\-]{%d,})"' % _BIG_BYTES)

_decoder = json.JSONDecoder()
_encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
_SPACES = (" ", "\t", "\n", "\r")
_space = re.compile(r"[ \t\n\r]*")


def split_body(body: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """(skeleton, parts by hash). A body that is not a JSON object in UTF-8 is all skeleton."""
    parts: dict[bytes, bytes] = {}
    skeleton = bytearray()
    position = 0
    for start, end in _spans(body):
        part = body[start:end]
        name = part_name(part)
        parts[name] = part
        skeleton += _segment(body[position:start]) + name
        position = end
    skeleton += _segment(body[position:])
    whole = bytes(skeleton)
    return (_RAW + whole if len(whole) < _SMALL_BYTES else _PACKED + zlib.compress(whole, _LEVEL)), parts


def part_name(part: bytes) -> bytes:
    return blake2b(part, digest_size=_HASH_BYTES).digest()


def pack_part(part: bytes) -> bytes:
    """A JSON value's text, compressed where that pays."""
    return part if len(part) < _SMALL_BYTES else zlib.compress(part, _LEVEL)


def unpack_part(packed: bytes) -> bytes:
    return zlib.decompress(packed) if packed.startswith(_ZLIB) else packed


def part_names(skeleton: bytes) -> list[bytes]:
    """The parts that a stored skeleton refers to, in order."""
    return [item for is_part, item in _segments(skeleton) if is_part]


def join_body(skeleton: bytes, parts: Mapping[bytes, bytes]) -> bytes:
    try:
        return b"".join(parts[item] if is_part else item for is_part, item in _segments(skeleton))
    except KeyError as error:
        raise StoreError(f"the log is damaged: body part {error.args[0].hex()} is missing") from None


def store_parts(conn: sa.Connection, parts: Mapping[bytes, bytes]) -> None:
    present = existing(conn, body_parts.c.hash, parts)
    rows = ({"hash": name, "bytes": pack_part(part)} for name, part in parts.items() if name not in present)
    insert_missing(conn, body_parts, rows)


def load_bodies(conn: sa.Connection, skeletons: Iterable[bytes]) -> list[bytes]:
    """The bodies as they were sent, in the order of their skeletons."""
    listed = list(skeletons)
    parts = load_parts(conn, listed)
    return [join_body(skeleton, parts) for skeleton in listed]


def load_parts(conn: sa.Connection, skeletons: Iterable[bytes]) -> dict[bytes, bytes]:
    """What the skeletons refer to, as far as it is there."""
    parts: dict[bytes, bytes] = {}
    for chunk in chunks(sorted({name for skeleton in skeletons for name in part_names(skeleton)})):
        rows = conn.execute(
            sa.select(body_parts.c.hash, body_parts.c.bytes).where(body_parts.c.hash.in_(chunk))
        )
        parts.update({name: unpack_part(packed) for name, packed in rows})
    return parts


def pack_json(value: Any) -> bytes:
    return pack_part(_encoder.encode(value).encode())


def unpack_json(packed: bytes) -> Any:
    return json.loads(unpack_part(packed))


def _segment(literal: bytes) -> bytes:
    return len(literal).to_bytes(4, "big") + literal


def _segments(skeleton: bytes) -> Iterator[tuple[bool, bytes]]:
    """(False, literal bytes) and (True, hash of a part) in turn, a literal first and last."""
    text = zlib.decompress(skeleton[1:]) if skeleton[:1] == _PACKED else skeleton[1:]
    position = 0
    while True:
        end = position + 4 + int.from_bytes(text[position : position + 4], "big")
        yield False, text[position + 4 : end]
        if end == len(text):
            return
        position = end + _HASH_BYTES
        yield True, text[end:position]


def _spans(body: bytes) -> list[tuple[int, int]]:
    """Byte ranges of the parts, in order; empty where the body is not what we know how to cut."""
    try:
        text = body.decode()
        spans = _object_spans(text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deep to look into
        return []
    if len(text) != len(body):
        spans = _byte_spans(text, spans)
    return [(start, end) for start, end in _cut_out(body, spans) if end - start >= _MIN_PART_BYTES]


def _cut_out(body: bytes, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Images, sounds and files within a message are parts of their own, whatever is said around them."""
    for start, end in spans:
        rest = start
        if end - start > _BIG_BYTES:
            for found in _BIG_STRING.finditer(body, start, end):
                yield rest, found.start(1)
                yield found.span(1)
                rest = found.end(1)
        yield rest, end


def _object_spans(text: str) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    position = _after(text, 0, "{")
    while True:
        key, position = _decoder.raw_decode(text, _skip(text, position))
        if not isinstance(key, str):
            raise ValueError("a key that is no string")
        start = _skip(text, _after(text, position, ":"))
        if key in _SPLIT_LISTS and text[start : start + 1] == "[":
            position = _element_spans(text, start, spans)
        else:
            _, position = _decoder.raw_decode(text, start)
            if key in _SPLIT_WHOLE:
                spans.append((start, position))
        position = _skip(text, position)
        if text[position : position + 1] != ",":
            _after(text, position, "}")
            return spans
        position += 1


def _element_spans(text: str, start: int, spans: list[tuple[int, int]]) -> int:
    position = _skip(text, start + 1)
    if text[position : position + 1] == "]":
        return position + 1
    while True:
        start = _skip(text, position)
        _, position = _decoder.raw_decode(text, start)
        spans.append((start, position))
        position = _skip(text, position)
        if text[position : position + 1] != ",":
            return _after(text, position, "]")
        position += 1


def _byte_spans(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    moved: list[tuple[int, int]] = []
    at_char = at_byte = 0
    for start, end in spans:
        first = at_byte + len(text[at_char:start].encode())
        at_char, at_byte = end, first + len(text[start:end].encode())
        moved.append((first, at_byte))
    return moved


def _skip(text: str, position: int) -> int:
    if text[position : position + 1] not in _SPACES:  # by far the most common
        return position
    match = _space.match(text, position)
    assert match is not None
    return match.end()


def _after(text: str, position: int, expected: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != expected:
        raise ValueError(f"expected {expected!r} at {position}")
    return position + 1
