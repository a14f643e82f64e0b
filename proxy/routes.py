"""Which of the engine's routes pass, and which of those are calls to be recorded.

An allow-list of vLLM's public API (read from vLLM 0.32): a block-list decays with each release. Admin and
development routes (weights, sleep, pause, profiling, adapters, RPC) are not on it and never pass. Paths are
compared after one percent-decoding, exactly as the engine's own router sees them; every other spelling is
simply not on the list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes


@dataclass(frozen=True, slots=True)
class Route:
    """`dialect` None: passes without a row in the log. `path` as the engine names it."""

    path: str
    dialect: str | None = None


_GENERATION = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/chat/completions/batch": "other",
    "/cohere/v2/chat": "other",
    "/generative_scoring": "other",
    "/inference/v1/generate": "other",
    "/invocations": "other",
    "/v1/systemone": "other",
}

_PLAIN = (
    "/classify",
    "/detokenize",
    "/docs",
    "/health",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/pooling",
    "/redoc",
    "/rerank",
    "/score",
    "/tokenize",
    "/tokenizer_info",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/models",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses/render",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
    "/version",
)

_WEBSOCKETS = frozenset(("/v1/realtime",))

_ROUTES = {path: Route(path) for path in _PLAIN} | {
    path: Route(path, dialect) for path, dialect in _GENERATION.items()
}
_STORED_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_-]+(/cancel)?")


def find_route(raw_path: bytes) -> Route | None:
    """The route that the engine would take for this path; None: it does not pass."""
    path = _decoded(raw_path)
    route = _ROUTES.get(path)
    if route is None and _STORED_RESPONSE.fullmatch(path):
        return Route(path)
    return route


def is_websocket_route(raw_path: bytes) -> bool:
    return _decoded(raw_path) in _WEBSOCKETS


def _decoded(raw_path: bytes) -> str:
    if b"%" in raw_path:
        return unquote_to_bytes(raw_path).decode("utf-8", "replace")
    return raw_path.decode("latin-1")
