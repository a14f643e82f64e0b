"""Errors in the words of each dialect: what an SDK of that vendor knows how to read."""

from __future__ import annotations

from typing import Any

import orjson

from ..transport.client import Client

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_doc(dialect: str, status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    if dialect == "messages":
        shown = kind or _ANTHROPIC_KINDS.get(status, "api_error")
        return {"type": "error", "error": {"type": shown, "message": message}}
    return {
        "error": {
            "message": message,
            "type": kind or ("invalid_request_error" if status < 500 else "server_error"),
            "param": None,
            "code": status,
        }
    }


def error_event(dialect: str, message: str) -> bytes:
    """An error inside a stream, as its last event."""
    if dialect == "messages":
        doc = error_doc(dialect, 500, message)
    else:
        doc = {
            "type": "error",
            "code": "server_error",
            "message": message,
            "param": None,
            "sequence_number": 0,
        }
    return b"event: error\ndata: " + orjson.dumps(doc) + b"\n\n"


async def refuse(client: Client, dialect: str, status: int, message: str, kind: str | None = None) -> None:
    body = orjson.dumps(error_doc(dialect, status, message, kind))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 501:
        headers.append((b"x-should-retry", b"false"))  # the official SDKs would try again in vain
    await client.start(status, headers)
    await client.write(body, is_last=True)
