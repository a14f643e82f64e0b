"""A stored value as others can read it, and back: ids as numbers, messages as JSON, hashes as hex.

Whatever would not come back bit by bit (an odd NaN, a body that is not text) is written as base64 instead.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from ...records import logprobs, token_ids
from ..blocks import pack_floats, pack_ids, unpack_floats, unpack_ids
from ..bodies import pack_json, pack_part, unpack_json, unpack_part

IDS = {("choices", "completion_ids"), ("token_blocks", "ids")}
FLOATS = {("choices", "behavior_logprobs")}
JSON = {("choices", "message"), ("policy_versions", "probe")}
PARTS = {("body_parts", "bytes")}
HASHES = {"hash", "parent", "prompt_block", "request_hash"}


_NOT_JSON = re.compile(rb"NaN|Infinity")


class ValueFaultError(Exception):
    """What a value that can't be read back is like, in words."""


def to_json(column: sa.Column[Any], value: Any) -> Any:
    """JSON that `from_json` makes the same stored value of; None stays None."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if not isinstance(value, bytes):
        return value
    key = (str(column.table.name), column.name)
    if key[1] in HASHES:
        return value.hex()
    readable = _readable(key, value)
    return {"base64": base64.b64encode(value).decode()} if readable is None else readable


def _readable(key: tuple[str, str], value: bytes) -> Any:
    try:
        if key in IDS:
            return _if_exact(unpack_ids(value).tolist(), value, lambda given: pack_ids(token_ids(given)))
        if key in FLOATS:
            given = unpack_floats(value).tolist()
            is_plain = all(abs(number) < float("inf") for number in given)  # JSON knows no NaN
            return _if_exact(given, value, lambda it: pack_floats(logprobs(it))) if is_plain else None
        if key in JSON:
            # Python's encoder takes numbers that JSON does not know, and an engine's message may hold some.
            is_plain = not _NOT_JSON.search(unpack_part(value))
            return {"json": unpack_json(value)} if is_plain else None
        if key in PARTS:
            return {"text": unpack_part(value).decode()}
    except (ValueError, zlib.error):
        pass
    return None


def _if_exact(readable: Any, value: bytes, pack: Callable[[Any], bytes]) -> Any:
    return readable if pack(readable) == value else None


def from_json(column: sa.Column[Any], value: Any) -> Any:
    """ValueFaultError for what no export would hold."""
    key = (str(column.table.name), column.name)
    if value is None:
        return None
    if not isinstance(column.type, sa.LargeBinary):
        return _plain(key, column, value)
    stored: bytes | None = None
    try:
        if key[1] in HASHES:
            stored = bytes.fromhex(value)
        elif isinstance(value, dict):
            ((form, content),) = value.items()
            stored = _packed(key, form, content)
        elif isinstance(value, list) and key in IDS:
            stored = pack_ids(array("I", value))
        elif isinstance(value, list) and key in FLOATS:
            stored = pack_floats(array("f", value))
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise ValueFaultError(f"{key[0]}.{key[1]}: {error}") from None
    if stored is None:
        raise ValueFaultError(f"{key[0]}.{key[1]}: not a value that an export holds")
    return stored


def _plain(key: tuple[str, str], column: sa.Column[Any], value: Any) -> Any:
    """The value itself, if it is of the column's kind."""
    if isinstance(column.type, sa.JSON):
        return value
    kind = column.type.python_type
    if kind is float and isinstance(value, dict) and value.get("float") in ("nan", "inf", "-inf"):
        return float(value["float"])
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:
        raise ValueFaultError(f"{key[0]}.{key[1]}: not a value that an export holds")
    return value


def _packed(key: tuple[str, str], form: str, content: Any) -> bytes | None:
    if form == "base64":
        return base64.b64decode(content, validate=True)
    if form == "json" and key in JSON:
        return pack_json(content)
    if form == "text" and key in PARTS:
        return pack_part(content.encode())
    return None


def require_complete(table: sa.Table, row: Mapping[str, Any]) -> None:
    """ValueFaultError where a column that every row has is empty."""
    for column in table.c:
        if not column.nullable and row[column.name] is None:
            raise ValueFaultError(f"a row of {table.name} has no {column.name}")
