"""A server that writes exactly the bytes of a script, and what the tests ask it through our connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import uvloop

from lightning_rl.proxy.transport.connections import Connections, Place, place_of
from lightning_rl.proxy.transport.wire import Answer

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nX-A: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nT: 1\r\n\r\n"
)
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nX-A: 1\r\n\r\nabcdefg"
TO_THE_END = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nabcdefg"
SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Loop = Callable[[], asyncio.AbstractEventLoop]
Act = Callable[["Peer"], Awaitable[None]]


@dataclass
class Peer:
    """One connection, as the server sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heads: list[bytes]

    async def hear(self) -> bytes:
        """A request; its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return await self.reader.readexactly(int(length or 0))

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0)

    async def is_left(self) -> bool:
        """Waits for the other side's end."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read(1) == b""
        return True


@dataclass
class Server:
    """`acts`: what happens on each connection in turn; then it is closed."""

    acts: list[Act]
    heads: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    faults: list[BaseException] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        act = self.acts[self.num_connections]
        self.num_connections += 1
        try:
            await act(Peer(reader, writer, self.heads))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side has left
        except Exception as error:  # noqa: BLE001 - raised in `run`
            self.faults.append(error)
        finally:
            writer.close()


def run(
    acts: list[Act],
    ask: Callable[[Connections, Place], Awaitable[None]],
    loop: Loop = LOOPS[0],
    keep_alive_sec: float = 60,
) -> Server:
    server = Server(acts)

    async def both() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        place = place_of(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        assert place is not None
        connections = Connections(keep_alive_sec=keep_alive_sec, connect_timeout_sec=5)
        try:
            async with asyncio.timeout(20):
                await ask(connections, place)
        finally:
            await connections.close()
            listener.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(both())
    assert not server.faults
    return server


def answering(*pieces: bytes, times: int = 1, then_waits: bool = False) -> Act:
    async def act(peer: Peer) -> None:
        for _ in range(times):
            await peer.hear()
            await peer.say(*pieces)
        if then_waits:
            await peer.is_left()

    return act


async def post(
    connections: Connections,
    place: Place,
    body: bytes | None = b"hi",
    method: str = "POST",
    *,
    on_new: bool = False,
) -> Answer:
    return await connections.send(place, method, "/v1/x?a=b", [(b"x-b", b"2")], body, on_new=on_new)
