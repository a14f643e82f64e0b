"""The agent's side of one exchange: its body in, bytes out, and notice when it leaves.

A thin layer over ASGI's `receive` and `send`. uvicorn swallows what is sent after a client has left, so
somebody has to be waiting for that news all the time: `watch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from .headers import Headers

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


PIECE_BYTES = 256 * 1024
"""Of an answer that is sent: what is larger would be copied while others wait."""
TOO_LARGE = "the request body is larger than the proxy's setting max_body_mb allows"


class BodyTooLargeError(Exception):
    """The request body is larger than the settings allow."""


class ClientGoneError(Exception):
    """The client left before its request was complete."""


class Client:
    """One request's client."""

    __slots__ = (
        "_interrupts",
        "_max_bytes",
        "_receive",
        "_send",
        "_task",
        "_watcher",
        "gone",
        "has_started",
        "is_complete",
        "sent_too_much",
    )

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._watcher: asyncio.Task[None] | None = None
        self._task = asyncio.current_task()
        self._interrupts = False
        self.gone = False
        self.sent_too_much = False
        self.has_started = False  # the status has been sent
        self.is_complete = False  # the last byte has been sent

    # --- what comes in ---

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLargeError, ClientGoneError."""
        parts = [part async for part in self.body_parts()]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def body_parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                self.sent_too_much = True
                raise BodyTooLargeError
            if part:
                yield part
            if not message.get("more_body", False):
                return

    # --- whether it is still there ---

    def watch(self) -> None:
        """From now on (the body is read): when the client leaves, the task that made this is cancelled."""
        self._interrupts = True
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """It has left, or whoever it stands for has."""
        if self.is_complete:
            return
        self.gone = True
        if self._interrupts and self._task is not None:
            self._interrupts = False
            self._task.cancel()

    def shield(self) -> None:
        """The client's leaving no longer interrupts: what follows must be done in any case."""
        self._interrupts = False

    def was_interrupted(self) -> bool:
        """After CancelledError: whether it was ours, because the client left. Takes the cancellation back."""
        if self.gone and self._task is not None and self._task.cancelling() == 1:
            self._task.uncancel()
            return True
        return False

    def close(self) -> None:
        self._interrupts = False
        if self._watcher is not None:
            self._watcher.cancel()

    # --- what goes out ---

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        if is_last:
            self.is_complete = not self.gone

    async def write_long(self, data: bytes) -> None:
        """The whole of an answer, or its last part: in pieces, each when there is room for it."""
        start = 0
        while len(data) - start > PIECE_BYTES:
            await self.write(data[start : start + PIECE_BYTES])
            start += PIECE_BYTES
        await self.write(data[start:] if start else data, is_last=True)

    async def refuse(self, status: int, message: str, *, retry_after_sec: int | None = None) -> None:
        """An error of the proxy's own, in the shape of the engine's."""
        error = {"message": message, "type": "lightning_proxy", "param": None, "code": status}
        await self.send_json(status, {"error": error}, retry_after_sec)

    async def send_json(self, status: int, doc: Any, retry_after_sec: int | None = None) -> None:
        body = orjson.dumps(doc)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if retry_after_sec is not None:
            headers.append((b"retry-after", str(retry_after_sec).encode()))
        await self.start(status, headers)
        await self.write(body, is_last=True)
