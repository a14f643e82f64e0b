"""Which connection to the engine a request takes, what is sent on it, and when it is given up."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fakes.scripted_server import (
    CHUNKED,
    COUNTED,
    LOOPS,
    SHORT,
    Loop,
    Peer,
    answering,
    post,
    run,
)

from lightning_rl.proxy.transport.connections import Connections, Place, place_of
from lightning_rl.proxy.transport.wire import BrokenOffError, CannotConnectError


def test_what_is_sent() -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for method, body in (("POST", b"hi"), ("POST", b""), ("GET", None)):
            await (await post(connections, place, body, method)).read()

    server = run([answering(SHORT, times=3)], ask)
    assert server.num_connections == 1
    host = server.heads[0].split(b"\r\n")[1]
    assert host.startswith(b"host: 127.0.0.1:")
    start = host + b"\r\nx-b: 2\r\n"
    assert server.heads == [
        b"POST /v1/x?a=b HTTP/1.1\r\n" + start + b"content-length: 2\r\n\r\n",
        b"POST /v1/x?a=b HTTP/1.1\r\n" + start + b"content-length: 0\r\n\r\n",
        b"GET /v1/x?a=b HTTP/1.1\r\n" + start + b"\r\n",
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("raw", "is_kept"),
    [
        (CHUNKED, True),
        (COUNTED, True),
        (COUNTED.replace(b"X-A: 1", b"connection: close"), False),
        (COUNTED.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (COUNTED + b"more", False),
        (COUNTED + SHORT, False),
        (CHUNKED + SHORT, False),
    ],
)
def test_connections_are_kept_unless_something_is_odd(raw: bytes, is_kept: bool, loop: Loop) -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for _ in range(2):
            assert await (await post(connections, place)).read() == b"abcdefg"

    both = answering(raw, times=2 if is_kept else 1, then_waits=True)
    assert run([both, both], ask, loop).num_connections == (1 if is_kept else 2)


def test_a_head_answer_with_a_body_gives_its_connection_up() -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for _ in range(2):
            assert await (await post(connections, place, method="HEAD")).read() == b""

    assert run([answering(COUNTED, then_waits=True)] * 2, ask).num_connections == 2


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_or_an_end_while_idle_are_noticed(loop: Loop) -> None:
    left = []

    async def says_more(peer: Peer) -> None:
        await peer.hear()
        await peer.say(SHORT)
        await asyncio.sleep(0.02)
        await peer.say(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        left.append(await peer.is_left())

    async def ask(connections: Connections, place: Place) -> None:
        for _ in range(3):
            assert await (await post(connections, place)).read() == b"ok"
            await asyncio.sleep(0.1)

    assert run([says_more, answering(SHORT), answering(SHORT)], ask, loop).num_connections == 3
    assert left == [True]


def test_idle_connections_are_given_up() -> None:
    left = asyncio.Event()

    async def waits(peer: Peer) -> None:
        await answering(SHORT)(peer)
        await peer.is_left()
        left.set()

    async def ask(connections: Connections, place: Place) -> None:
        assert await (await post(connections, place)).read() == b"ok"
        await left.wait()

    run([waits], ask, keep_alive_sec=0.05)


def test_the_race_with_an_engine_that_closes_is_told_apart() -> None:
    async def closes(peer: Peer) -> None:
        await answering(SHORT)(peer)
        await peer.hear()

    async def ask(connections: Connections, place: Place) -> None:
        await (await post(connections, place)).read()
        with pytest.raises(BrokenOffError) as broken:
            await post(connections, place)
        assert (broken.value.is_reused, broken.value.has_begun) == (True, False)
        with pytest.raises(BrokenOffError) as broken:
            await post(connections, place)
        assert (broken.value.is_reused, broken.value.has_begun) == (False, False)

    run([closes, answering()], ask)


def test_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        place = place_of(f"http://127.0.0.1:{sock.getsockname()[1]}")

    async def ask(connections: Connections, _: Place) -> None:
        assert place is not None
        with pytest.raises(CannotConnectError, match="Connect"):
            await post(connections, place)
        with pytest.raises(CannotConnectError):
            await post(connections, Place("no such host", 80, b"", b""))

    for loop in LOOPS:
        run([], ask, loop)


def test_closing_a_whole_answer_keeps_its_connection() -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for _ in range(2):
            answer = await post(connections, place)
            await answer.read()
            answer.close()

    assert run([answering(SHORT, times=2)], ask).num_connections == 1


@pytest.mark.parametrize("bad", ["/a b", "/a\r\nx: y", "/a\n"])
def test_no_request_can_be_smuggled(bad: str) -> None:
    async def ask(connections: Connections, place: Place) -> None:
        with pytest.raises(ValueError, match="line break"):
            await connections.send(place, "GET", bad, [], None)
        with pytest.raises(ValueError, match="line break"):
            await connections.send(place, "GET", "/", [(b"x", b"a\r\nb: c")], None)

    run([], ask)


def test_which_engines_it_is_for() -> None:
    assert place_of("http://engine:8000/base") == Place("engine", 8000, b"/base", b"engine:8000")
    assert place_of("http://[::1]:80") == Place("::1", 80, b"", b"[::1]")
    for other in (
        "https://engine",
        "http://me:pw@engine",
        "http://bücher",
        "http://",
        "http://a:99999",
        "http://[::1",
    ):
        assert place_of(other) is None
