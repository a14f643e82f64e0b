"""The engine's WebSocket route, passed both ways: messages, close codes, subprotocol, refusals.

Owns one connection to the engine per client connection. Knows nothing of what the messages mean, and nothing
of it is recorded. Frames, compression and pings are each hop's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.http11 import Response
from websockets.typing import Subprotocol

from .client import Receive, Scope, Send
from .headers import Headers

OPEN_TIMEOUT_SEC = 60.0
CLOSE_TIMEOUT_SEC = 5.0

_NO_CODE, _VANISHED = 1005, 1006
_OF_THE_HANDSHAKE = frozenset(
    (
        "connection",
        "upgrade",
        "sec-websocket-accept",
        "sec-websocket-extensions",
        "sec-websocket-key",
        "sec-websocket-protocol",
        "sec-websocket-version",
    )
)


class _Connect(connect):
    """One attempt at one address: a redirect is an answer like any other."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def pass_websocket(
    url: str, headers: Sequence[tuple[str, str]], scope: Scope, receive: Receive, send: Send
) -> None:
    """`url` and `headers`: of the engine, `ws://…`. Returns when one side is closed, the other told."""
    if (await receive())["type"] != "websocket.connect":
        return
    try:
        engine = await _Connect(
            url,
            additional_headers=[pair for pair in headers if pair[0] not in _OF_THE_HANDSHAKE],
            subprotocols=[Subprotocol(name) for name in scope["subprotocols"]] or None,
            user_agent_header=None,
            compression=None,
            proxy=None,
            open_timeout=OPEN_TIMEOUT_SEC,
            close_timeout=CLOSE_TIMEOUT_SEC,
            ping_interval=None,
            max_size=None,
        )
    except InvalidStatus as refusal:
        answer = refusal.response
        await _answer(send, answer.status_code, _pairs(answer), bytes(answer.body or b""))
        return
    except (OSError, TimeoutError, InvalidHandshake) as error:
        await refuse_websocket(send, 502, f"the engine's WebSocket is not reachable: {error}")
        return
    try:
        await _accept(engine, send)
        await _pass_messages(engine, receive, send)
    except OSError:  # the client left while something was being sent to it
        await engine.close(1001)
    finally:
        engine.transport.abort()


async def refuse_websocket(send: Send, status: int, message: str) -> None:
    """A refusal of the proxy's own, in the shape of the engine's errors."""
    error = {"message": message, "type": "lightning_proxy", "param": None, "code": status}
    await _answer(send, status, [(b"content-type", b"application/json")], orjson.dumps({"error": error}))


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Answer the handshake as HTTP does."""
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def _accept(engine: ClientConnection, send: Send) -> None:
    assert engine.response is not None, "the handshake is over"
    message: dict[str, Any] = {"type": "websocket.accept", "headers": _pairs(engine.response)}
    if engine.subprotocol is not None:
        message["subprotocol"] = engine.subprotocol
    await send(message)


def _pairs(answer: Response) -> Headers:
    found: Iterable[tuple[str, str]] = answer.headers.raw_items()
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1", "surrogateescape"))
        for name, value in found
        if name.lower() not in _OF_THE_HANDSHAKE
    ]


async def _pass_messages(engine: ClientConnection, receive: Receive, send: Send) -> None:
    """Until one side closes; the other is then closed in the same words."""
    up = asyncio.create_task(_up(engine, receive))
    down = asyncio.create_task(_down(engine, send))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            down.result()
            await _close_client(engine, send)
            return
        await _close_engine(engine, *up.result())
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _up(engine: ClientConnection, receive: Receive) -> tuple[int, str]:
    """The client's messages; gives the code and reason with which it closed."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return message.get("code", _NO_CODE), message.get("reason") or ""
        text = message.get("text")
        try:
            await engine.send(message["bytes"] if text is None else text)
        except ConnectionClosed:
            await asyncio.Event().wait()  # the other direction ends this


async def _down(engine: ClientConnection, send: Send) -> None:
    async for data in _messages(engine):
        kind = "text" if isinstance(data, str) else "bytes"
        await send({"type": "websocket.send", kind: data})


async def _messages(engine: ClientConnection) -> AsyncIterator[str | bytes]:
    while True:
        try:
            yield await engine.recv()
        except ConnectionClosed:
            return


async def _close_client(engine: ClientConnection, send: Send) -> None:
    code, reason = engine.close_code, engine.close_reason or ""
    if code in (None, _VANISHED):
        return  # no close frame for the client either: its connection just ends
    await send({"type": "websocket.close", "code": 1000 if code == _NO_CODE else code, "reason": reason})


async def _close_engine(engine: ClientConnection, code: int, reason: str) -> None:
    if code == _VANISHED:
        engine.transport.abort()
    elif code == _NO_CODE:  # without a code, or gone without a word: for the engine it is the same
        await engine.close(None, "")  # type: ignore[arg-type]
    else:
        await engine.close(code, reason)
