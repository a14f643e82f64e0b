"""Connections to the engine that close at the wrong moment: one safe repetition, and never an unsafe one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest

from lightning_rl.proxy.transport.upstream import FAILURES, Upstream

BOTH_CLIENTS = pytest.mark.parametrize("user", ["", "me:pw@"], ids=["ours", "aiohttp"])  # see `place_of`
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


@dataclass
class Engine:
    """Answers by a script: for each request in turn `ok`, or what it does instead."""

    script: list[str]
    requests: list[tuple[int, bytes]] = field(default_factory=list)  # (number of the connection, body)
    num_connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.num_connections
        self.num_connections += 1
        try:
            await self._answer(number, reader, writer)
        finally:
            writer.close()

    async def _answer(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append((number, await _read_body(reader, head)))
                act = self.script.pop(0)
                if act == "reset":
                    linger = struct.pack("ii", 1, 0)  # close() sends RST
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.write({"ok": HEAD + b"{}", "half a head": HEAD[:20]}.get(act, b""))
                await writer.drain()
                if act != "ok":
                    break


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"chunked" in head.lower():
        return await reader.readuntil(b"0\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(length or 0))


def ask_twice(script: list[str], body: Callable[[], bytes | AsyncIterator[bytes]], user: str = "") -> Engine:
    """Two requests, one after the other; an error of the second one is raised."""
    engine = Engine(script)

    async def run() -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        url = f"http://{user}127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream = Upstream(None)
        try:
            for _ in range(2):
                answer = await upstream.send(url, "POST", "/v1/x", [], body())
                assert await answer.read() == b"{}"
        finally:
            await upstream.close()
            server.close()

    asyncio.run(run())
    return engine


@pytest.mark.parametrize("how", ["close", "reset"])
@BOTH_CLIENTS
def test_an_idle_connection_that_was_just_closed_is_replaced_once(how: str, user: str) -> None:
    engine = ask_twice(["ok", how, "ok"], lambda: b"body", user)
    assert engine.requests == [(0, b"body"), (0, b"body"), (1, b"body")]


@pytest.mark.parametrize("how", ["close", "reset"])
@BOTH_CLIENTS
def test_only_once(how: str, user: str) -> None:
    with pytest.raises(FAILURES):
        ask_twice(["ok", how, how, "ok"], lambda: b"body", user)


@BOTH_CLIENTS
def test_not_when_the_answer_had_begun(user: str) -> None:
    with pytest.raises(FAILURES):
        ask_twice(["ok", "half a head", "ok"], lambda: b"body", user)


@pytest.mark.parametrize("how", ["close", "reset"])
@BOTH_CLIENTS
def test_not_on_a_new_connection(how: str, user: str) -> None:
    with pytest.raises(FAILURES):
        ask_twice([how, "ok", "ok"], lambda: b"body", user)


def test_not_with_a_body_that_streams() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"body"

    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        ask_twice(["ok", "close", "ok"], parts)
