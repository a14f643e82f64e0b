"""HTTP/1.1 on one connection to an engine: one request after the other.

Owns the bytes on the way up and back, and what is known when a connection breaks: whether it was made for
this request, and whether the answer had begun. Knows nothing of calls, retries or other connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import httptools

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 2**16
HIGH_WATER_BYTES = 2**19  # of an answer that nobody has taken yet
PIECE_BYTES = 2**16  # larger bodies go up in such pieces, as the engine takes them


class CannotConnectError(OSError):
    """No connection: the engine has not heard of the request."""


class BrokenOffError(ConnectionError):
    """The connection ended before the answer did, or what came is not HTTP."""

    def __init__(self, reason: str, *, is_reused: bool, has_begun: bool) -> None:
        super().__init__(reason)
        self.is_reused = is_reused  # the connection had served another request before
        self.has_begun = has_begun  # a byte of the answer has come


class _BehindTheEndError(Exception):
    """Bytes that belong to no request."""


class Answer:
    """An answer as it comes: its head first, then (by iteration) the bytes of its body."""

    __slots__ = (
        "_connection",
        "_error",
        "_is_whole",
        "_waiter",
        "num_waiting_bytes",
        "parts",
        "raw_headers",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0  # no head yet
        self.raw_headers: Headers = []
        self._connection = connection
        self.parts: list[bytes] = []  # of the body, that nobody has taken yet
        self.num_waiting_bytes = 0  # about as many, as they came
        self._is_whole = False
        self._error: BrokenOffError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> str | None:
        """The first of that (lower-case) name."""
        return next((value.decode("latin-1") for key, value in self.raw_headers if key.lower() == name), None)

    @property
    def content_type(self) -> str:
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    @property
    def content_encoding(self) -> str | None:
        return self.header(b"content-encoding")

    async def head(self) -> None:
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        """Whatever has come. Raises BrokenOffError behind the last byte of an answer that is not whole."""
        while not self.parts:
            if self._is_whole:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        if self.num_waiting_bytes > HIGH_WATER_BYTES and not self._is_whole:
            self._connection.read_on()
        self.num_waiting_bytes = 0
        return data

    async def read(self) -> bytes:
        return b"".join([data async for data in self])

    def close(self) -> None:
        """The engine learns at once that nobody waits for the rest. Of a whole answer: nothing."""
        if not self._is_whole:
            self._connection.abort()

    # --- what the connection says ---

    def end(self, error: BrokenOffError | None) -> None:
        self._error = error
        self._is_whole = error is None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """One connection. `idle` is where it waits between requests, `everyone` has it as long as it is open."""

    on_body: Callable[[bytes], None]  # the parser calls it with the pieces of the body

    def __init__(self, idle: list[Connection], everyone: set[Connection]) -> None:
        self._idle = idle
        self._everyone = everyone
        self._answer: Answer | None = None
        self._is_reused = False
        self._body = memoryview(b"")  # of the request: what has not been written yet
        self._can_write = True
        self.idle_since = 0.0

    # --- the request ---

    def ask(self, method: bytes, head: bytes, body: bytes) -> Answer:
        self._is_reused = self.idle_since > 0
        self._has_begun = self._is_paused = self._ends_at_close = False
        self._num_head_bytes = 0
        self._is_head = method == b"HEAD"
        self._answer = answer = Answer(self)
        self.on_body = self._refuse_body if self._is_head else answer.parts.append  # no call of Python's
        self._parser = httptools.HttpResponseParser(self)  # a new one: it keeps trailers for the next head
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._body = memoryview(body)
            self._write_on()
        return answer

    def _write_on(self) -> None:
        while self._body and self._can_write and not self._transport.is_closing():
            piece, self._body = self._body[:PIECE_BYTES], self._body[PIECE_BYTES:]
            self._transport.write(piece)

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        if self._body:
            asyncio.get_running_loop().call_soon(self._write_on)

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def eof_received(self) -> None:
        self._closed(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed(error)
        self._everyone.discard(self)

    def _closed(self, error: Exception | None) -> None:
        answer = self._answer
        if answer is None:
            self.abort()
        elif error is None and self._ends_at_close:
            self._finish(is_kept=False)
            answer.wake()
        else:
            self._break(str(error or "") or "the connection was closed")

    def abort(self) -> None:
        """Close it at once; whoever waits for its answer hears of it."""
        if self._answer is not None:
            self._break("the connection was closed here")
        if self in self._idle:
            self._idle.remove(self)
        if not self._transport.is_closing():
            self._transport.abort()

    @property
    def is_usable(self) -> bool:
        return not self._transport.is_closing()

    def read_on(self) -> None:
        if self._is_paused and self._answer is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # --- the answer ---

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody has asked
            self.abort()
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._answer is not None:
                self._break(f"not an HTTP answer: {error}")
            else:
                self.abort()  # what came behind the answer is nobody's
        if self._answer is not None:
            self._count(len(data), answer)
        answer.wake()

    def _count(self, num_bytes: int, answer: Answer) -> None:
        """Not more than should lie here."""
        if not answer.status:
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._break(f"the answer's headers are larger than {MAX_HEAD_BYTES} bytes")
            return
        answer.num_waiting_bytes += num_bytes
        if answer.num_waiting_bytes > HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise _BehindTheEndError  # so that the parser stops

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None and not self._answer.status:  # else it is a trailer
            self._answer.raw_headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            answer.raw_headers.clear()  # there is another one to come
            return
        answer.status = status
        if self._is_head:
            self._finish(is_kept=self._parser.should_keep_alive())
            return
        if status not in (204, 304):
            self._ends_at_close = answer.header(b"content-length") is None and not any(
                b"chunked" in value.lower()
                for name, value in answer.raw_headers
                if name.lower() == b"transfer-encoding"
            )
        if self._body and status >= 400 and not self._parser.should_keep_alive():
            self._body = memoryview(b"")  # it does not want the rest

    def _refuse_body(self, data: bytes) -> None:
        self.abort()  # the answer to HEAD has none

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._finish(is_kept=self._parser.should_keep_alive())

    def _finish(self, *, is_kept: bool) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.end(None)
        is_sent = not self._body and not self._transport.get_write_buffer_size()
        if not is_kept or not is_sent or self._ends_at_close or self._transport.is_closing():
            self._body = memoryview(b"")
            self._transport.abort()
            return
        if self._is_paused:
            self._transport.resume_reading()  # or its end would not be noticed
        self.idle_since = asyncio.get_running_loop().time()
        self._idle.append(self)

    def _break(self, reason: str) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        self._body = memoryview(b"")
        answer.end(BrokenOffError(reason, is_reused=self._is_reused, has_begun=self._has_begun))
        self._transport.abort()
        answer.wake()
