"""What can be the name of an episode, a task, a batch, an agent or a source, and the key of a tag.

One rule for every way in: a path, a header, a body, the API, a command, a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UserError

MAX_NAME_CHARS = 256

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")

EPISODE_KEY_PREFIX = b"lk-"
EPISODE_KEY = re.compile(EPISODE_KEY_PREFIX + rb"[A-Za-z0-9_-]{43}")
"""The form of a key issued for an episode, for all who must neither take one for a name nor write it down."""


def name_fault(name: str) -> str | None:
    """Why it can't be a name, in words that follow it."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"is longer than {MAX_NAME_CHARS} characters"
    if _UNPRINTABLE.search(name):
        return "has control characters"
    if not name.isascii() and _SURROGATE.search(name):
        return "has half characters (lone surrogates)"
    return _taken(name)


def _taken(name: str) -> str | None:
    """Text that would do, if it did not mean something else already."""
    if name in (".", ".."):
        return "is no name: a path can't hold it"
    if EPISODE_KEY.fullmatch(name.encode()):
        return "is an episode key; send it as the API key"  # a name is written to the log, a key never
    return None


def require_name(where: str, name: str) -> str:
    """UserError for what can't be a name."""
    fault = name_fault(name)
    if fault is not None:
        raise UserError(f"{where} {fault}")
    return name


def checked_name(name: str) -> str:
    """For Pydantic: ValueError for what can't be a name."""
    return _without_fault(name, name_fault(name))


def checked_tag_key(key: str) -> str:
    """The same of the key of a tag."""
    return _without_fault(key, tag_key_fault(key))


def _without_fault(text: str, fault: str | None) -> str:
    if fault is not None:
        raise ValueError(fault)
    return text


def tag_key_fault(key: str) -> str | None:
    """As of a name; and no quote, which no filter by tag could look for."""
    return 'has a "' if '"' in key else name_fault(key)


def require_tag_keys(keys: Iterable[str]) -> None:
    """UserError for the first that can't be one."""
    for key in keys:
        fault = tag_key_fault(key)
        if fault is not None:
            raise UserError(f"the tag key {key!r} {fault}")
