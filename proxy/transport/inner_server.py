"""A listener on loopback inside this process, for requests whose address only we give."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

Application = Callable[..., Awaitable[None]]


class InnerServer:
    """Starts with the first `url`; `app` is an ASGI application of HTTP alone."""

    def __init__(self, app: Application, **options: Any) -> None:
        self._app = app
        self._options = options
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def url(self) -> str:
        """Without /v1."""
        if self._listener is None:
            self._listener = socket.socket()
            self._listener.bind(("127.0.0.1", 0))
            self._listener.listen(2048)
            config = uvicorn.Config(
                self._app, log_config=None, access_log=False, lifespan="off", ws="none", **self._options
            )
            self._server = _QuietServer(config)
            self._serving = asyncio.create_task(self._server.serve([self._listener]))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None and self._listener is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._serving
            self._listener.close()


class _QuietServer(uvicorn.Server):
    """A second server in a process whose signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
