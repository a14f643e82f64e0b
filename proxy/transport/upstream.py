"""The connection to the engines: which client asks, and which headers travel in which direction.

Bodies that are bytes go over our own connections (connections.py); aiohttp has what they can't do: TLS, and
bodies that stream up. Knows HTTP; nothing of calls, tokens or the log. Bodies pass as bytes, compressed too.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from types import NoneType
from typing import Any, Protocol

import aiohttp
from yarl import URL

from .connections import Connections, Place, place_of
from .headers import OUR_HEADERS, Headers
from .wire import BrokenOffError, CannotConnectError

CONNECT_TIMEOUT_SEC = 5.0
LARGE_BODY_BYTES = 2**20  # from here on aiohttp warns of bytes
KEEP_ALIVE_SEC = 4.0
"""Less than vLLM's own 5 s: a connection that the engine is about to close must not take a POST."""

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Keys never travel: the client's may be the proxy's token or name an episode, and the engine's is our own.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"api-key",
}

FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What can be raised while the engine is asked or read."""

CONNECT_FAILURES = (CannotConnectError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Those of them that are raised before a byte was sent: the call may go to another engine."""


RACE_SEC = 5.0
"""A request that fails later than this has not met a connection that was just being closed."""


class EngineAnswer(Protocol):
    """An answer whose head has come."""

    @property
    def status(self) -> int: ...
    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]: ...
    @property
    def content_type(self) -> str: ...
    @property
    def content_encoding(self) -> str | None: ...
    def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come. Raises one of FAILURES where it breaks off."""
        ...

    async def read(self) -> bytes: ...
    def close(self) -> None:
        """Where it is not whole: the engine learns at once that nobody waits for the rest."""
        ...


class _OfAiohttp:
    """Its answers, in this shape."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.raw_headers = answer.raw_headers
        self.content_type = answer.content_type
        self.content_encoding = answer.headers.get("Content-Encoding")

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._answer.content.iter_any())

    async def read(self) -> bytes:
        return await self._answer.read()

    def close(self) -> None:
        if not self._answer.content.at_eof():
            self._answer.close()


_is_fresh: ContextVar[bool] = ContextVar("_is_fresh")  # whether this task's request made its connection


class _Connector(aiohttp.TCPConnector):
    """Tells a request whether its connection was made for it; aiohttp's own tracing is far dearer."""

    async def _create_connection(self, *request: Any) -> Any:
        _is_fresh.set(True)
        return await super()._create_connection(*request)


def _was_never_read(error: Exception) -> bool:
    """The connection was closed before the answer's first byte (as far as anybody can tell)."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the head that had begun
    return isinstance(error, aiohttp.ClientOSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)


class Upstream:
    """The way to the engines, as the relay sees it. Create and close it on the event loop."""

    def __init__(self, api_key: str | None) -> None:
        self._authorization = f"Bearer {api_key}".encode() if api_key else None
        self._connections = Connections(
            keep_alive_sec=KEEP_ALIVE_SEC, connect_timeout_sec=CONNECT_TIMEOUT_SEC
        )
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None  # each request on a connection of its own

    async def close(self) -> None:
        await self._connections.close()
        for session in (self._session, self._fresh):
            if session is not None:
                await session.close()

    async def send(
        self,
        engine_url: str,
        method: str,
        path_and_query: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        wants_plain: bool = False,
    ) -> EngineAnswer:
        """Ask that engine; returns at the answer's head. `wants_plain`: the answer must not be compressed.

        An engine may close an idle connection at the moment that we use it: the request is then sent once
        more, on a connection of its own. Never where a byte of the answer has come, the connection was new,
        or the body is a stream.
        """
        forwarded = self._forwarded(headers, keeps_length=not isinstance(body, (bytes, NoneType)))
        if wants_plain:
            plain = (b"accept-encoding", b"identity")
            forwarded = [plain if pair[0] == b"accept-encoding" else pair for pair in forwarded]
        place = _place(engine_url)
        if place is not None and isinstance(body, (bytes, NoneType)):
            return await self._send_whole(place, method, path_and_query, forwarded, body)
        return await self._send_by_aiohttp(method, _url(engine_url + path_and_query), _texts(forwarded), body)

    async def _send_whole(
        self, place: Place, method: str, path_and_query: str, headers: Headers, body: bytes | None
    ) -> EngineAnswer:
        started = time.monotonic()
        try:
            return await self._connections.send(place, method, path_and_query, headers, body)
        except BrokenOffError as error:
            is_race = error.is_reused and time.monotonic() - started < RACE_SEC
            if not is_race or error.has_begun:
                raise
        return await self._connections.send(place, method, path_and_query, headers, body, on_new=True)

    async def _send_by_aiohttp(
        self,
        method: str,
        url: URL,
        headers: list[tuple[str, str]],
        body: bytes | AsyncIterator[bytes] | None,
    ) -> EngineAnswer:
        if self._session is None:
            self._session = _new_session(_Connector(limit=0, keepalive_timeout=KEEP_ALIVE_SEC))
        _is_fresh.set(False)
        started = time.monotonic()
        try:
            return _OfAiohttp(
                await self._session.request(
                    method, url, headers=headers, data=_data(body), allow_redirects=False
                )
            )
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            is_race = time.monotonic() - started < RACE_SEC and not _is_fresh.get()
            if not is_race or not _was_never_read(error) or not isinstance(body, (bytes, NoneType)):
                raise
        if self._fresh is None:
            self._fresh = _new_session(_Connector(limit=0, force_close=True))
        return _OfAiohttp(
            await self._fresh.request(method, url, headers=headers, data=_data(body), allow_redirects=False)
        )

    def request_headers(self, headers: Headers) -> list[tuple[str, str]]:
        """What the engine is sent of the client's headers, with the engine's key."""
        return _texts(self._forwarded(headers))

    def _forwarded(self, headers: Headers, *, keeps_length: bool = False) -> Headers:
        forwarded = request_headers(headers, keeps_length=keeps_length)
        if self._authorization is not None:
            forwarded.append((b"authorization", self._authorization))
        return forwarded


def _new_session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SEC, sock_read=None),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        read_bufsize=2**18,
    )


@lru_cache(maxsize=256)
def _place(engine_url: str) -> Place | None:
    return place_of(engine_url)


def _data(body: bytes | AsyncIterator[bytes] | None) -> io.BytesIO | bytes | AsyncIterator[bytes] | None:
    """Large bodies as files: aiohttp writes those piece by piece, and bytes at one go, with a warning."""
    return io.BytesIO(body) if isinstance(body, bytes) and len(body) > LARGE_BODY_BYTES else body


@lru_cache(maxsize=1024)
def _url(text: str) -> URL:
    return URL(text, encoded=True)  # as the client spelled it


def request_headers(headers: Headers, *, keeps_length: bool = False) -> Headers:
    """What the engine is sent of the client's headers, in their order."""
    named = _named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if (name not in _NOT_FORWARDED or (keeps_length and name == b"content-length"))
        and not name.startswith(OUR_HEADERS)
        and name not in named
    ]


def response_headers(answer: EngineAnswer, length: int | None = None) -> Headers:
    """What the client is sent of the engine's headers, in their order; `length` where the body changed."""
    pairs = [(name.lower(), value) for name, value in answer.raw_headers]
    named = _named_by_connection(pairs)
    return [
        (name, str(length).encode() if length is not None and name == b"content-length" else value)
        for name, value in pairs
        if name not in _HOP_BY_HOP and name not in named
    ]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Headers of this hop only: named by `Connection`, or trailers, which servers file as headers."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"trailer" or (name == b"connection" and value.lower() not in (b"keep-alive", b"close")):
            named.update(token.strip().lower() for token in value.split(b","))
    return named


def _texts(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), _text(value)) for name, value in headers]


def _text(value: bytes) -> str:
    try:
        return value.decode()  # aiohttp writes header values as UTF-8
    except UnicodeDecodeError:
        return value.decode("latin-1")
