"""Who is calling: the marks that a request carries, which one wins, and what is left for the engine.

Owns the attribution cascade (path, headers, aliases of others, API key, body) and what our headers say.
Knows nothing of the log: an episode need not exist to be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from ...errors import UserError
from ...records import MALFORMED_MARK, Attribution, Purpose
from ...store.names import name_fault, require_name
from ..transport.headers import OUR_HEADERS

FORM = "the base URL is /episodes/EPISODE/v1, with /tasks/TASK, /batches/BATCH or /agents/AGENT before /v1"

_ALIAS_HEADERS = {
    b"x-session-id": "X-Session-Id",
    b"helicone-session-id": "Helicone-Session-Id",
    b"x-litellm-session-id": "X-Litellm-Session-Id",
    b"litellm_session_id": "litellm_session_id",
}
"""Session headers of other products. They pass to the engine as well: it may know them."""

_PATH = re.compile(rb"((?:/(?:episodes|tasks|batches|agents)/[^/]*)+)(/.*)", re.DOTALL)
_LIKE_OURS = re.compile(rb"/(?:episode|task|batch|batche|agent)s?(?:/|$)", re.IGNORECASE)
"""How a path begins that names somebody, well or badly; no route of the engine's does."""


@dataclass(frozen=True, slots=True)
class Address:
    """The marks outside the body, strongest first, and the path that is left for the engine."""

    engine_path: bytes
    marks: tuple[tuple[str, str], ...]  # (rule, episode)
    task_id: str | None = None
    batch: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] | None = None
    faults: tuple[str, ...] = ()  # marks that can't be names, in words
    keys: tuple[bytes, ...] = field(default=(), repr=False)  # what stood in the API-key slots
    names_task: bool = False  # the path names a task or a batch

    def with_key(self, episode_id: str, agent: str | None) -> Address:
        """And the API key was issued for this episode (and agent)."""
        return replace(self, marks=(*self.marks, ("key", episode_id)), agent=self.agent or agent)


def read_address(
    raw_path: bytes, headers: Iterable[tuple[bytes, bytes]], keys: Iterable[bytes] = ()
) -> Address:
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
        return Address(engine_path, (), keys=tuple(keys))
    faults: list[str] = []
    if ours.get(b"episode"):
        marks.append(("header", require_name("X-Lightning-Episode", ours[b"episode"])))
    elif b"episode" in ours:
        faults.append("X-Lightning-Episode is empty")
    # Another product's header may hold anything: what can't be a name is no mark, and no reason to refuse.
    for rule, named_by in aliases:
        _take(rule, named_by, marks, faults)

    def name_of(segment: str, header: bytes) -> str | None:
        shown = f"X-Lightning-{header.decode().title()}"
        value = named.get(segment) or ours.get(header) or None
        return value and require_name(shown, value)

    return Address(
        engine_path,
        tuple(marks),
        name_of("tasks", b"task"),
        name_of("batches", b"batch"),
        name_of("agents", b"agent"),
        _read_tags(ours[b"tags"]) if ours.get(b"tags") else None,
        tuple(faults),
        tuple(keys),
        "tasks" in named or "batches" in named,
    )


def attribute(address: Address, body: Mapping[str, Any] | None) -> Attribution:
    """Add the body's marks; say which one won, which named another episode, and which could not be read."""
    marks, faults = list(address.marks), list(address.faults)
    names = {"task_id": address.task_id, "batch": address.batch, "agent": address.agent}
    if body is not None:
        metadata = body.get("metadata")
        if isinstance(metadata, dict):
            _take("body", metadata.get("episode_id"), marks, faults, "metadata.episode_id")
            for name, had in names.items():
                if not had and name in metadata:
                    names[name] = _body_name(f"metadata.{name}", metadata[name], faults)
        if "litellm_session_id" in body:
            _take("alias:litellm_session_id", body["litellm_session_id"], marks, faults)
    rule, episode = marks[0] if marks else ("none", None)
    said = [f"{other} says {value!r}" for other, value in marks[1:] if value != episode]
    if faults:
        said.insert(0, MALFORMED_MARK + ", ".join(faults))
    return Attribution(
        episode,
        names["task_id"],
        names["batch"],
        names["agent"],
        tags=address.tags or {},
        rule=rule,
        conflict="; ".join(said) or None,
    )


def without_episode(address: Address, found: Attribution) -> Attribution:
    """Nothing names an episode. UserError where the path has forgotten it; else the call says what is odd.

    An agent alone is nothing odd: judges and the like are outside of episodes.
    """
    if address.names_task:
        raise UserError(f"the path names a task or a batch and nothing names the episode; {FORM}")
    if found.task_id is None and found.batch is None:
        return found
    fault = "a task or a batch is named, but no episode"
    said = found.conflict
    if said is None or not said.startswith(MALFORMED_MARK):
        return replace(found, conflict=MALFORMED_MARK + fault + (f"; {said}" if said else ""))
    return replace(found, conflict=said.replace(MALFORMED_MARK, f"{MALFORMED_MARK}{fault}, ", 1))


def of_evaluation(found: Attribution, episode_id: str) -> Attribution:
    """A call of an evaluation's: of that episode, where it names none."""
    if found.episode_id is not None:
        return replace(found, purpose=Purpose.EVAL)
    return replace(found, episode_id=episode_id, rule="evaluation", purpose=Purpose.EVAL)


def misspelt(raw_path: bytes) -> str | None:
    """For a path that leads nowhere: what it should have been, if it was meant for us."""
    if _LIKE_OURS.match(raw_path) is None:
        return None
    return f"no such address; {FORM}"


def _read_path(raw_path: bytes) -> tuple[dict[str, str], bytes]:
    match = _PATH.fullmatch(raw_path)
    if match is None:
        raise UserError("the path names an episode but no route: use /episodes/EPISODE/v1 as base URL")
    segments = match.group(1).split(b"/")[1:]
    named: dict[str, str] = {}
    for name, quoted in zip(segments[::2], segments[1::2], strict=True):
        kind = name.decode()
        if kind in named:
            raise UserError(f"the path names two {kind}; name one")
        where = f"the path segment after /{kind}/"
        try:
            named[kind] = require_name(where, unquote_to_bytes(quoted).decode())
        except UnicodeDecodeError:
            raise UserError(f"{where} is no UTF-8 text; percent-encode the name's UTF-8 bytes") from None
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


def _body_name(where: str, value: Any, faults: list[str]) -> str | None:
    """A body is the agent's own business: what can't be a name is not refused, only not taken, and told."""
    if value is None:
        return None
    fault = name_fault(value) if isinstance(value, str) else "is not text"
    if fault is not None:
        faults.append(f"{where} {fault}")
        return None
    return str(value)


def _take(
    rule: str, value: Any, marks: list[tuple[str, str]], faults: list[str], where: str | None = None
) -> None:
    """Add the mark, or why it is none."""
    name = _body_name(where or rule.removeprefix("alias:"), value, faults)
    if name is not None:
        marks.append((rule, name))
