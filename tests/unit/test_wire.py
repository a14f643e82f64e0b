"""Answers of an engine as bytes: cut anywhere, odd, early, endless."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from fakes.scripted_server import (
    CHUNKED,
    COUNTED,
    LOOPS,
    SHORT,
    TO_THE_END,
    Loop,
    Peer,
    answering,
    post,
    run,
)

from lightning_rl.proxy.transport.connections import Connections, Place
from lightning_rl.proxy.transport.wire import HIGH_WATER_BYTES, MAX_HEAD_BYTES, BrokenOffError


async def take(connections: Connections, place: Place, received: list[bytes]) -> None:
    async for data in await post(connections, place):
        received.append(data)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("raw", [CHUNKED, COUNTED, TO_THE_END])
def test_bytes_may_come_in_any_pieces(raw: bytes, loop: Loop) -> None:
    pieces = [[raw], [raw[i : i + 1] for i in range(len(raw))]]
    pieces += [[raw[:at], raw[at:]] for at in range(1, len(raw))]

    async def ask(connections: Connections, place: Place) -> None:
        for _ in pieces:
            answer = await post(connections, place, on_new=True)
            assert (answer.status, await answer.read()) == (200, b"abcdefg")
            assert dict(answer.raw_headers)[b"X-A"] == b"1"
            assert b"T" not in dict(answer.raw_headers)

    run([answering(*some) for some in pieces], ask, loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("raw", [CHUNKED, COUNTED])
def test_a_cut_answer_is_never_a_whole_one(raw: bytes, loop: Loop) -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for at in range(len(raw)):
            received: list[bytes] = []
            with pytest.raises(BrokenOffError) as broken:
                await take(connections, place, received)
            assert broken.value.has_begun == (at > 0)
            assert b"abcdefg".startswith(b"".join(received))
            if at > raw.index(b"abc") + 3:
                assert b"".join(received)

    run([answering(raw[:at]) if at else answering() for at in range(len(raw))], ask, loop)


def test_headers_keep_order_repetitions_and_case() -> None:
    raw = (
        b"HTTP/1.1 418 I'm a \xe9\r\nB: 1 \t\r\na:\r\nB: na\xefve\r\nContent-Type: Text/Event-Stream; q=1\r\n"
        b"content-encoding: br\r\ncontent-length: 0\r\n\r\n"
    )

    async def ask(connections: Connections, place: Place) -> None:
        answer = await post(connections, place)
        assert answer.status == 418
        assert answer.raw_headers[:3] == [(b"B", b"1"), (b"a", b""), (b"B", b"na\xefve")]
        assert (answer.content_type, answer.content_encoding) == ("text/event-stream", "br")
        assert await answer.read() == b""

    run([answering(raw)], ask)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("POST", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
        ("POST", b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\nHTTP/1.1 103 Early\r\n\r\nHTTP/1.1 204 No\r\n\r\n"),
    ],
)
def test_answers_without_a_body(method: str, raw: bytes) -> None:
    async def ask(connections: Connections, place: Place) -> None:
        for _ in range(2):
            answer = await post(connections, place, method=method)
            assert answer.status >= 200
            assert b"x" not in dict(answer.raw_headers)
            assert await answer.read() == b""

    assert run([answering(raw, times=2)], ask).num_connections == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 300_000),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000,
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
def test_what_is_not_an_answer_is_refused(raw: bytes) -> None:
    async def ask(connections: Connections, place: Place) -> None:
        with pytest.raises(BrokenOffError) as broken:
            await post(connections, place)
        assert broken.value.has_begun

    run([answering(raw, then_waits=True)], ask)


def test_a_broken_chunk_breaks_the_answer_off() -> None:
    async def ask(connections: Connections, place: Place) -> None:
        answer = await post(connections, place)
        with pytest.raises(BrokenOffError, match="not an HTTP answer"):
            await answer.read()

    run([answering(CHUNKED.replace(b"4;x=y", b"zz"), then_waits=True)], ask)


@pytest.mark.parametrize("loop", LOOPS)
def test_who_reads_slowly_slows_the_engine(loop: Loop) -> None:
    size = 64 * 2**20
    sent = [0]

    async def pours(peer: Peer) -> None:
        await peer.hear()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 2**16):
            await peer.say(b"x" * 2**16)
            sent[0] += 2**16
        await answering(SHORT)(peer)

    async def ask(connections: Connections, place: Place) -> None:
        answer = await post(connections, place)
        await asyncio.sleep(0.3)
        assert sent[0] < size // 2
        num_bytes, most = 0, 0
        async for data in answer:
            num_bytes += len(data)
            most = max(most, len(data))
        assert num_bytes == size
        assert most < 4 * HIGH_WATER_BYTES
        assert await (await post(connections, place)).read() == b"ok"  # it is read again

    assert run([pours], ask, loop).num_connections == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_large_bodies_go_up_as_they_are_taken(loop: Loop) -> None:
    body = bytes(range(256)) * 2**15
    seen = []

    async def takes(peer: Peer) -> None:
        seen.append(await peer.hear())
        await peer.say(SHORT)
        seen.append(await peer.hear())
        await peer.say(SHORT)

    async def ask(connections: Connections, place: Place) -> None:
        for sent in (body, b"small"):
            assert await (await post(connections, place, sent)).read() == b"ok"

    assert run([takes], ask, loop).num_connections == 1
    assert seen == [body, b"small"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("status", [b"200 OK", b"413 Too Large\r\nconnection: close"])
def test_an_answer_before_the_body_was_sent(status: bytes, loop: Loop) -> None:
    left = []

    async def refuses(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(SHORT.replace(b"200 OK", status))
        with contextlib.suppress(ConnectionError):
            while await peer.reader.read(2**20):
                pass
        left.append(True)

    async def ask(connections: Connections, place: Place) -> None:
        answer = await post(connections, place, b"x" * 2**26)
        assert answer.status == int(status[:3])
        assert await answer.read() == b"ok"
        assert await (await post(connections, place)).read() == b"ok"  # on another connection

    assert run([refuses, answering(SHORT)], ask, loop).num_connections == 2


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("when", ["before the head", "in the body", "closing all"])
def test_the_engine_hears_at_once_that_nobody_waits(when: str, loop: Loop) -> None:
    left = asyncio.Event()

    async def waits(peer: Peer) -> None:
        await peer.hear()
        if when != "before the head":
            await peer.say(CHUNKED[:-20])
        assert await peer.is_left()
        left.set()

    async def ask(connections: Connections, place: Place) -> None:
        if when == "before the head":
            task = asyncio.create_task(post(connections, place))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            answer = await post(connections, place)
            await anext(answer)
            if when == "in the body":
                answer.close()
            else:
                await connections.close()
            with pytest.raises(BrokenOffError):
                await answer.read()
        await left.wait()

    run([waits], ask, loop)


def test_a_reset_behind_an_answer_without_a_length_is_no_end() -> None:
    async def resets(peer: Peer) -> None:
        await peer.hear()
        await peer.say(TO_THE_END)
        await asyncio.sleep(0.05)
        sock = peer.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def ask(connections: Connections, place: Place) -> None:
        answer = await post(connections, place)
        assert await anext(answer) == b"abcdefg"
        with pytest.raises(BrokenOffError):
            await anext(answer)

    run([resets], ask)
