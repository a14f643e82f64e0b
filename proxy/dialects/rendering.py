"""The engine's own rendering of a Responses or Messages request: the prompt ids that it would use itself.

Asked before each translated call (`…/render`, which vLLM offers with `--enable-scale-out`). It is both the
prompt that the call is then made with and the proof that the recorded one is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..messages.capture import error_text
from ..messages.splice import set_members
from ..transport.headers import Headers

NOT_OFFERED = "the engine does not render: start vLLM with --enable-scale-out (lightning engine serve does)"


@dataclass(frozen=True, slots=True)
class Rendered:
    """`prompt_ids` None: the engine offers no rendering, and `fault` says so."""

    prompt_ids: list[int] | None = None
    is_constrained: bool = False  # a grammar will mask some of the tokens
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refuses the request itself."""

    status: int
    message: str
    kind: str  # the engine's word for it


def render_request(body: bytes, doc: Mapping[str, Any], model: str | None) -> bytes:
    """The agent's body, for the model that serves it."""
    members = [] if model is None else [("model", orjson.dumps(model))]
    if doc.get("stream"):
        members.append(("stream", b"false"))
    return set_members(body, members, doc.keys()) if members else body


def render_headers(headers: Headers) -> Headers:
    """The agent's headers, without what is about its own body and answer."""
    kept = [(name, value) for name, value in headers if name not in _ABOUT_BODIES]
    return [*kept, (b"content-type", b"application/json")]


_ABOUT_BODIES = (b"accept", b"accept-encoding", b"content-encoding", b"content-length", b"content-type")


def read_rendering(status: int, body: bytes) -> Rendered | Refused:
    try:
        doc = orjson.loads(body)
    except orjson.JSONDecodeError:
        doc = None
    if not isinstance(doc, dict):
        doc = {}
    if status == 200 and isinstance(doc.get("token_ids"), list):
        sampling = doc.get("sampling_params")
        grammar = sampling.get("structured_outputs") if isinstance(sampling, dict) else None
        return Rendered(doc["token_ids"], is_constrained=grammar is not None)
    error = doc.get("error")
    if isinstance(error, dict) and status not in (403, 501):
        return Refused(status, error_text(doc) or "", str(error.get("type") or "invalid_request_error"))
    return Rendered(fault=NOT_OFFERED)
