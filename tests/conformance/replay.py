"""An engine that replays answers byte by byte: status line, header order, chunk borders and breaks as told.

It knows HTTP as far as a request's end, and nothing of what is asked; the case that is being run says what
comes back. Every connection and every request is counted, so that orphans show.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from websockets.http11 import Request as Handshake
from websockets.server import ServerProtocol

from lightning_rl.tests.conformance.wire import Pairs

PAUSE_SEC = 0.0005
"""Between two pieces, so that they arrive as two."""


@dataclass(frozen=True)
class Asked:
    """A request as the engine has seen it."""

    method: str
    target: str
    headers: Pairs
    body: bytes
    raw_head: bytes = b""

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


@dataclass(frozen=True)
class Reply:
    """An answer. `blocks` joined is its body; a stream is cut anywhere, whatever the blocks."""

    status_line: bytes = b"HTTP/1.1 200 OK"
    headers: Pairs = ((b"content-type", b"application/json"),)
    blocks: tuple[bytes, ...] = ()
    framing: str = "length"  # length, chunked, close, none
    breaks: bool = False  # the connection dies after the last block, before the message's end
    closes: bool = False  # the connection is closed behind a complete answer, without a word
    after_sec: float = 0.0
    between_sec: float = PAUSE_SEC
    cuts: bool = True  # False: its blocks are its pieces


Answering = Callable[[Asked], Reply]
WsEvent = Callable[[ServerProtocol, object], None]


class ReplayEngine:
    """Set `answer` (for WebSockets `ws_handshake` and `ws_event`); `note` is told of every request."""

    def __init__(self) -> None:
        self.answer: Answering = lambda asked: Reply()
        self.ws_handshake: Callable[[ServerProtocol, Handshake], object] | None = None
        self.ws_event: WsEvent | None = None
        self.rng = random.Random(0)
        self.is_early: Callable[[Asked], bool] = lambda asked: False  # answered before its body has come
        self.note: Callable[[Asked], None] = lambda asked: None
        self.num_open = 0  # requests that are being answered
        self.num_connections = 0
        self.num_websockets = 0
        self.num_left = 0  # requests whose client went away before their answer's end

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve_one(reader, writer):
                    pass
        finally:
            self.num_connections -= 1
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        method, target, _version = first.decode("latin-1").split(" ")
        pairs = tuple((line.partition(b":")[0], line.partition(b":")[2].strip(b" \t")) for line in lines)
        asked = Asked(method, target, pairs, b"", head)
        if asked.values(b"upgrade") == [b"websocket"]:
            self.note(asked)
            self.num_websockets += 1
            try:
                await self._serve_websocket(head, reader, writer)
            finally:
                self.num_websockets -= 1
            return False
        if self.is_early(asked):
            reply = self.answer(asked)
            self.note(asked)
            writer.write(_head(reply))
            for block in reply.blocks:
                writer.write(block)
            await writer.drain()
            await asyncio.sleep(0.05)
            return False
        if asked.values(b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked = Asked(method, target, pairs, await _read_body(asked, reader), head)
        self.note(asked)
        self.num_open += 1
        leaving = asyncio.create_task(_has_left(reader))
        answering = asyncio.create_task(self._write(self.answer(asked), writer))
        try:
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.num_left += 1
                return False
            return answering.result()
        finally:
            self.num_open -= 1
            for task in (leaving, answering):
                task.cancel()
            await asyncio.gather(leaving, answering, return_exceptions=True)

    async def _write(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        if reply.after_sec:
            await asyncio.sleep(reply.after_sec)
        wire = [_head(reply)]
        for block in reply.blocks:
            pieces = self._cut(block) if reply.cuts else [block]
            wire += [_chunk(piece) for piece in pieces] if reply.framing == "chunked" else pieces
        if reply.framing == "chunked" and not reply.breaks:
            wire.append(b"0\r\n\r\n")
        for piece in self._cut(b"".join(wire)) if reply.cuts else wire:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(reply.between_sec)
        return not (reply.breaks or reply.closes or reply.framing == "close")

    def _cut(self, data: bytes) -> list[bytes]:
        """The same bytes in a few pieces, cut anywhere."""
        if len(data) < 2:
            return [data] if data else []
        num_cuts = min(len(data) - 1, self.rng.randint(0, 12))
        cuts = sorted(self.rng.sample(range(1, len(data)), num_cuts))
        return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    async def _serve_websocket(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        handshake, take_event = self.ws_handshake, self.ws_event
        protocol = ServerProtocol(max_size=None)
        protocol.receive_data(head)
        while True:
            for event in protocol.events_received():
                if isinstance(event, Handshake):
                    assert handshake is not None
                    response = handshake(protocol, event)
                    if isinstance(response, bytes):  # a refusal in the case's own words
                        writer.write(response)
                        await writer.drain()
                        return
                elif take_event is not None:
                    take_event(protocol, event)
            outgoing = protocol.data_to_send()
            writer.write(b"".join(outgoing))
            await writer.drain()
            if b"" in outgoing:  # both have said that they close
                return
            data = await reader.read(1 << 16)
            if not data:
                protocol.receive_eof()
                return
            protocol.receive_data(data)


def _head(reply: Reply) -> bytes:
    lines = [reply.status_line, *(name + b": " + value for name, value in reply.headers)]
    if reply.framing == "length":
        lines.append(b"content-length: %d" % sum(map(len, reply.blocks)))
    elif reply.framing == "chunked":
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def _read_body(asked: Asked, reader: asyncio.StreamReader) -> bytes:
    if asked.values(b"transfer-encoding"):
        body = b""
        while True:
            num_bytes = int(await reader.readuntil(b"\r\n"), 16)
            if num_bytes == 0:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass
                return body
            body += (await reader.readexactly(num_bytes + 2))[:-2]
    lengths = asked.values(b"content-length")
    return await reader.readexactly(int(lengths[0])) if lengths else b""


async def _has_left(reader: asyncio.StreamReader) -> None:
    """Ends when the client does. Nothing is pipelined here, so nothing is lost by not reading."""
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110 - reading would take bytes
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def replaying(engine: ReplayEngine) -> Iterator[tuple[str, int]]:
    """Run the engine in a thread; gives its address."""
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    address: list[tuple[str, int]] = []

    async def run() -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=512, limit=1 << 20)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        address.append(server.sockets[0].getsockname()[:2])
        started.set()
        await ended.wait()
        server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(10), "the replaying engine did not start"
    try:
        yield address[0]
    finally:
        stop[0]()
        thread.join(10)
