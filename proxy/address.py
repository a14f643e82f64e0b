"""Who is calling: the marks that a request carries, which one wins, and what is left for the engine.

Owns the attribution cascade (path, headers, aliases of others, body) and the names of our headers. Knows
nothing of the log: an episode need not exist to be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from ..errors import UserError
from ..records import Attribution

MAX_NAME_CHARS = 256

OUR_HEADERS = b"x-lightning-"
"""Headers with this prefix are ours: read here, never sent to the engine."""

_ALIAS_HEADERS = {
    b"x-session-id": "X-Session-Id",
    b"helicone-session-id": "Helicone-Session-Id",
    b"x-litellm-session-id": "X-Litellm-Session-Id",
    b"litellm_session_id": "litellm_session_id",
}
"""Session headers of other products. They pass to the engine as well: it may know them."""

_PATH = re.compile(rb"((?:/(?:episodes|tasks|batches|agents)/[^/]*)+)(/.*)", re.DOTALL)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Address:
    """The marks outside the body, strongest first, and the path that is left for the engine."""

    engine_path: bytes
    marks: tuple[tuple[str, str], ...]  # (rule, episode)
    task_id: str | None = None
    batch: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] | None = None


def read_address(raw_path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Address:
    """Read path and headers. Raises UserError for a name that can't be one."""
    named: dict[str, str] = {}
    engine_path = raw_path
    if raw_path.startswith((b"/episodes/", b"/tasks/", b"/batches/", b"/agents/")):
        named, engine_path = _read_path(raw_path)
    marks = [("path", named["episodes"])] if "episodes" in named else []
    ours: dict[bytes, str] = {}
    aliases: list[tuple[str, str]] = []
    for name, value in headers:
        if name.startswith(OUR_HEADERS):
            ours[name[len(OUR_HEADERS) :]] = _text(value)
        elif name in _ALIAS_HEADERS and value:
            aliases.append((f"alias:{_ALIAS_HEADERS[name]}", _text(value)))
    if not (ours or aliases or named):
        return Address(engine_path, ())
    if ours.get(b"episode"):
        marks.append(("header", _checked("X-Lightning-Episode", ours[b"episode"])))
    # Another product's header may hold anything: what can't be a name is no mark, and no reason to refuse.
    marks += [(rule, value) for rule, value in aliases if _fault(value) is None]

    def name_of(segment: str, header: bytes) -> str | None:
        shown = f"X-Lightning-{header.decode().title()}"
        value = named.get(segment) or ours.get(header) or None
        return value and _checked(shown, value)

    return Address(
        engine_path,
        tuple(marks),
        name_of("tasks", b"task"),
        name_of("batches", b"batch"),
        name_of("agents", b"agent"),
        _read_tags(ours[b"tags"]) if ours.get(b"tags") else None,
    )


def attribute(address: Address, body: Mapping[str, Any] | None) -> Attribution:
    """Add the body's marks and say which one won, and which named another episode."""
    marks = list(address.marks)
    found = Attribution(
        task_id=address.task_id, batch=address.batch, agent=address.agent, tags=address.tags or {}
    )
    if body is not None:
        metadata = body.get("metadata")
        if isinstance(metadata, dict):
            marks += _body_mark("body", metadata.get("episode_id"))
            found = replace(
                found,
                task_id=found.task_id or _body_name(metadata.get("task_id")),
                batch=found.batch or _body_name(metadata.get("batch")),
                agent=found.agent or _body_name(metadata.get("agent")),
            )
        marks += _body_mark("alias:litellm_session_id", body.get("litellm_session_id"))
    if not marks:
        return found
    rule, episode = marks[0]
    others = [f"{other} says {value!r}" for other, value in marks[1:] if value != episode]
    return replace(found, episode_id=episode, rule=rule, conflict="; ".join(others) or None)


def _read_path(raw_path: bytes) -> tuple[dict[str, str], bytes]:
    match = _PATH.fullmatch(raw_path)
    if match is None:
        raise UserError("the path names an episode but no route: use /episodes/EPISODE/v1 as base URL")
    segments = match.group(1).decode("latin-1").split("/")[1:]
    named: dict[str, str] = {}
    for kind, quoted in zip(segments[::2], segments[1::2], strict=True):
        if kind in named:
            raise UserError(f"the path names two {kind}; name one")
        named[kind] = _checked(f"the path segment after /{kind}/", unquote(quoted))
    return named, match.group(2)


def _read_tags(text: str) -> dict[str, str]:
    """`key=value, key=value`; a word without `=` is a tag whose value is empty."""
    pairs = (item.partition("=") for item in text.split(",") if item.strip())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def _text(value: bytes) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()


def _fault(name: str) -> str | None:
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"is longer than {MAX_NAME_CHARS} characters"
    if _UNPRINTABLE.search(name):
        return "has control characters"
    return None


def checked_name(name: str) -> str:
    """ValueError for what can't be the name of an episode, a task, a batch, an agent or a source."""
    fault = _fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


def _checked(where: str, name: str) -> str:
    fault = _fault(name)
    if fault is not None:
        raise UserError(f"{where} {fault}")
    return name


def _body_name(value: Any) -> str | None:
    """A body is the agent's own business: what can't be a name is not refused, only not taken."""
    return value if isinstance(value, str) and _fault(value) is None else None


def _body_mark(rule: str, value: Any) -> list[tuple[str, str]]:
    name = _body_name(value)
    return [(rule, name)] if name is not None else []
