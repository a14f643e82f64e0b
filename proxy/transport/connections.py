"""The connections to the engines: which are kept, when a new one is made, when an idle one is given up.

Owns what a request looks like and which connection it takes. Knows nothing of calls or repetitions. No
cookies, redirects, proxies, TLS, or bodies that stream up (docs/decisions/0012).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from .wire import Answer, CannotConnectError, Connection


@dataclass(frozen=True)
class Place:
    """Where an engine listens. `base` goes before every path, `name` is what it is called in `Host`."""

    host: str
    port: int
    base: bytes
    name: bytes


def place_of(engine_url: str) -> Place | None:
    """None: this needs a client that can do more."""
    try:
        parts = urlsplit(engine_url)
        port = parts.port or 80
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc or not engine_url.isascii():
        return None
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    name += "" if port == 80 else f":{port}"
    return Place(parts.hostname, port, parts.path.encode(), name.encode())


class Connections:
    """Of every engine. Use and close them on one event loop."""

    def __init__(self, *, keep_alive_sec: float, connect_timeout_sec: float) -> None:
        self._keep_alive_sec = keep_alive_sec
        self._connect_timeout_sec = connect_timeout_sec
        self._idle: dict[Place, list[Connection]] = {}  # the longest idle first
        self._everyone: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def send(
        self,
        place: Place,
        method: str,
        path_and_query: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes | None,
        *,
        on_new: bool = False,
    ) -> Answer:
        """Returns at the answer's head. Raises CannotConnectError, BrokenOffError. `on_new`: connection."""
        verb = method.encode()
        head = _head(place, verb, path_and_query, headers, body)
        connection = None if on_new else self._take(place)
        if connection is None:
            connection = await self._connect(place)
        answer = connection.ask(verb, head, body or b"")
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def _take(self, place: Place) -> Connection | None:
        idle = self._idle.get(place)
        since = asyncio.get_running_loop().time() - self._keep_alive_sec
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since > since:
                return connection
            connection.abort()
        return None

    async def _connect(self, place: Place) -> Connection:
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(place, [])
        if self._sweep is None:
            self._sweep = loop.call_later(self._keep_alive_sec, self._close_idle)
        try:
            async with asyncio.timeout(self._connect_timeout_sec):
                _, connection = await loop.create_connection(
                    lambda: Connection(idle, self._everyone), place.host, place.port
                )
        except TimeoutError as error:
            raise CannotConnectError(f"no connection within {self._connect_timeout_sec:g} s") from error
        except (OSError, UnicodeError) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise CannotConnectError(f"no connection: {text}") from error
        return connection

    def _close_idle(self) -> None:
        """From time to time: connections that nobody has needed for so long."""
        loop = asyncio.get_running_loop()
        since = loop.time() - self._keep_alive_sec
        for idle in self._idle.values():
            while idle and idle[0].idle_since <= since:
                idle[0].abort()
        again = bool(self._everyone)
        self._sweep = loop.call_later(self._keep_alive_sec / 2, self._close_idle) if again else None

    async def close(self) -> None:
        for connection in list(self._everyone):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()
        await asyncio.sleep(0)  # the event loop closes them on its next turn


def _head(
    place: Place,
    method: bytes,
    path_and_query: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes | None,
) -> bytes:
    target = place.base + path_and_query.encode("latin-1")
    lines = [method + b" " + target + b" HTTP/1.1", b"host: " + place.name]
    lines += [name + b": " + value for name, value in headers]
    if body is not None:
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or target.count(b" "):
        raise ValueError("a line break or a blank where the request can't have one")
    return head + b"\r\n\r\n"
