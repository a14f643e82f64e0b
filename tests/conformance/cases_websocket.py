"""WebSockets: the same conversations straight and through, message by message, down to how they end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from lightning_rl.tests.conformance.running import Running
from lightning_rl.tests.conformance.substitutions import MARK

PATH = "/v1/realtime"
LONG = "é" * 300_000


@dataclass(frozen=True)
class Conversation:
    """What the client does, and how the engine takes the handshake and each message."""

    name: str
    client: Callable[[Any, list[Any]], None]
    engine: Callable[[ServerProtocol, Frame], None] = lambda protocol, frame: None
    accepts: Callable[[ServerProtocol, Request], Any] | None = None
    subprotocols: tuple[str, ...] = ()
    target: str = PATH
    headers: tuple[tuple[str, str], ...] = ()


def _accept(protocol: ServerProtocol, request: Request, *more: tuple[str, str]) -> None:
    response = protocol.accept(request)
    for name, value in more:
        response.headers[name] = value
    protocol.send_response(response)


def echo(protocol: ServerProtocol, frame: Frame) -> None:
    if frame.opcode is Opcode.TEXT:
        protocol.send_text(bytes(frame.data))
    elif frame.opcode is Opcode.BINARY:
        protocol.send_binary(bytes(frame.data))


def closing(code: int | None, reason: str = "") -> Callable[[ServerProtocol, Frame], None]:
    def close(protocol: ServerProtocol, frame: Frame) -> None:
        if frame.opcode is Opcode.TEXT:
            protocol.send_text(b"last words")
            protocol.send_close(code, reason)

    return close


def in_fragments(protocol: ServerProtocol, frame: Frame) -> None:
    if frame.opcode is Opcode.TEXT:
        protocol.send_text(b"one ", fin=False)
        protocol.send_continuation("zwö".encode()[:3], fin=False)
        protocol.send_ping(b"are you there")
        protocol.send_continuation("zwö".encode()[3:], fin=True)


def says(*messages: str | bytes, num_answers: int | None = None, code: int = 1000, reason: str = "") -> Any:
    def talk(socket: Any, seen: list[Any]) -> None:
        for message in messages:
            socket.send(message)
        for _ in range(len(messages) if num_answers is None else num_answers):
            seen.append(socket.recv(timeout=10))
        socket.close(code, reason)

    return talk


def listens(socket: Any, seen: list[Any]) -> None:
    """One message; then until the other side ends it."""
    socket.send("go")
    with contextlib.suppress(ConnectionClosed):
        while True:
            seen.append(socket.recv(timeout=10))


def vanishes(protocol: ServerProtocol, frame: Frame) -> None:
    if frame.opcode is Opcode.TEXT:
        raise ConnectionResetError


def refusing(status: bytes, body: bytes) -> Callable[[ServerProtocol, Request], bytes]:
    head = b"HTTP/1.1 " + status + b"\r\nDate: Mon, 30 Nov 2026 12:00:00 GMT\r\nX-Why: because\r\n"
    head += b"Content-Type: application/json\r\nConnection: close\r\n"
    return lambda protocol, request: head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _with_protocol(protocol: ServerProtocol, request: Request) -> None:
    _accept(protocol, request, ("Sec-WebSocket-Protocol", "v2"), ("X-Session", "s-1"))


CONVERSATIONS = (
    Conversation("ws-text", says("hello", '{"type":"session.update"}', "", "ü€😀"), echo),
    Conversation("ws-binary", says(b"\x00\xff" * 100, b"", b"x"), echo),
    Conversation("ws-mixed", says("a", b"b", "c"), echo),
    Conversation("ws-large", says(LONG, LONG.encode()), echo),
    Conversation("ws-fragments", says("go"), in_fragments),
    Conversation("ws-client-closes", says("x", code=4001, reason="enough"), echo),
    Conversation("ws-engine-closes", listens, closing(1000)),
    Conversation("ws-engine-closes-1011", listens, closing(1011, "broken")),
    Conversation("ws-engine-closes-4999", listens, closing(4999, "own code ü")),
    Conversation("ws-engine-vanishes", listens, vanishes),
    Conversation("ws-subprotocol", says("x"), echo, _with_protocol, ("v1", "v2")),
    Conversation("ws-no-subprotocol", says("x"), echo, None, ("v1",)),
    Conversation("ws-query", says("x"), echo, target=PATH + "?model=a%20b&x=1&x=2"),
    Conversation("ws-headers", says("x"), echo, headers=(("Origin", "http://x"), ("X-Twice", "1"))),
    Conversation("ws-refused-403", says(), echo, refusing(b"403 Forbidden", b'{"error":"no"}')),
    Conversation("ws-refused-404", says(), echo, refusing(b"404 Not Found", b'{"detail":"Not Found"}')),
    Conversation("ws-refused-302", says(), echo, refusing(b"302 Found", b"")),
    Conversation("ws-refused-503", says(), echo, refusing(b"503 Service Unavailable", b"x" * 5000)),
)


def run_conversation(running: Running, conversation: Conversation) -> list[str]:
    """What is different through the proxy."""
    engine_saw: list[list[Any]] = [[], []]
    seen = []
    for address, prefix, saw in (
        (running.engine_address, "", engine_saw[0]),
        (running.address, f"/episodes/{conversation.name}", engine_saw[1]),
    ):
        _prepare(running, conversation, saw)
        seen.append(_talk(address, prefix, conversation))
        deadline = time.monotonic() + 5
        while running.engine.num_websockets and time.monotonic() < deadline:
            time.sleep(0.005)
    faults = [] if seen[0] == seen[1] else [f"the client saw {seen[1]}, not {seen[0]}"[:1500]]
    if engine_saw[0] != engine_saw[1]:
        faults.append(f"the engine saw {engine_saw[1]}, not {engine_saw[0]}"[:1500])
    return faults


def _prepare(running: Running, conversation: Conversation, saw: list[Any]) -> None:
    def handshake(protocol: ServerProtocol, request: Request) -> Any:
        of_the_hop = ("host", "connection", "upgrade", "sec-websocket-key", "sec-websocket-extensions")
        of_the_hop += ("sec-websocket-version", "user-agent")
        headers = [(n.lower(), v) for n, v in request.headers.raw_items() if n.lower() not in of_the_hop]
        saw.append((request.path, sorted(headers)))
        return (conversation.accepts or _accept)(protocol, request)

    def event(protocol: ServerProtocol, frame: Any) -> None:
        if frame.opcode is Opcode.CLOSE:
            saw.append((protocol.close_rcvd.code, protocol.close_rcvd.reason))
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            saw.append((frame.opcode, bytes(frame.data)))
        conversation.engine(protocol, frame)

    running.engine.ws_handshake, running.engine.ws_event = handshake, event


def _talk(address: tuple[str, int], prefix: str, conversation: Conversation) -> list[Any]:
    seen: list[Any] = []
    uri = "ws://{}:{}".format(*address) + prefix + conversation.target
    try:
        socket = connect(
            uri,
            subprotocols=[Subprotocol(name) for name in conversation.subprotocols] or None,
            additional_headers=[(MARK.decode(), conversation.name), *conversation.headers],
            compression=None,
            max_size=None,
            proxy=None,
        )
    except InvalidStatus as refusal:
        answer = refusal.response
        headers = [(n.lower(), value) for n, value in answer.headers.raw_items() if n.lower() != "connection"]
        return [answer.status_code, headers, bytes(answer.body or b"")]
    with socket:
        seen += [socket.subprotocol, socket.response.headers.get("X-Session")]
        conversation.client(socket, seen)
    return [*seen, socket.close_code, socket.close_reason]
