"""What the fakes that are ASGI applications have in common."""

from __future__ import annotations

from typing import Any


async def body_of(receive: Any) -> bytes:
    """A request's body, whole."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
