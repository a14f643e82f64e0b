"""The translator's process, seen from the proxy: started at the first call that needs it, started again if it
dies, ended with the proxy.

LiteLLM takes seconds and 200 MB to import, which neither the proxy's start nor its memory should pay. Spoken
to over a unix socket in a folder of our own, with a secret per process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from ...errors import LightningError
from .wire import SECRET, StartUp, Vendor

START_TIMEOUT_SEC = 120.0
STOP_TIMEOUT_SEC = 5.0
WORKER = "lightning_rl.proxy.dialects.worker"
MISSING = (
    "Responses and Messages are translated by LiteLLM, which is not installed here: "
    "pip install 'lightning-rl[providers]', or set dialects = \"pass\" to relay them without exact tokens"
)
MISSING_FOR_VENDORS = (
    "other vendors are asked through LiteLLM, which is not installed here: "
    "pip install 'lightning-rl[providers]'"
)

logger = logging.getLogger("lightning.dialects")


class TranslatorError(LightningError):
    """The translator can't be had. The message is one line."""


def is_installed() -> bool:
    return importlib.util.find_spec("litellm") is not None


class Translator:
    """Create and use it on one event loop. `command` starts the process."""

    def __init__(
        self, vendors: tuple[Vendor, ...] = (), command: Sequence[str] = (sys.executable, "-m", WORKER)
    ) -> None:
        self._vendors = vendors
        self._command = command
        self.start_timeout_sec = START_TIMEOUT_SEC
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._session: aiohttp.ClientSession | None = None
        self._secret = ""
        self._starting: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def send(self, path: str, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        """Ask, starting the process if there is none. Returns at the answer's head."""
        session = await self._ready()
        return await session.post(
            f"http://translator{path}", data=body, headers={**headers, SECRET: self._secret}
        )

    async def _ready(self) -> aiohttp.ClientSession:
        """The start is nobody's own: a client that leaves meanwhile does not take it along."""
        if self._starting is None and (self._process is None or self._process.poll() is not None):
            self._starting = asyncio.create_task(self._restart())
            self._starting.add_done_callback(self._is_through)
        if self._starting is not None:
            await asyncio.shield(self._starting)
        if self._session is None:
            raise TranslatorError(
                "the translator (LiteLLM) does not start; the proxy's log on stderr says why"
            )
        return self._session

    def _is_through(self, _: asyncio.Task[None]) -> None:
        self._starting = None

    async def _restart(self) -> None:
        """`_session` says whether it is there now."""
        if self._process is not None:
            logger.warning("the translator has died (exit code %s): starting it again", self._process.poll())
        await self._close()
        if not self._is_stopped:
            await self._start()
        if self._session is None:
            await self._close()

    async def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lightning-"))  # only we may enter it
        start_up = StartUp(str(self._folder / "translator"), secrets.token_hex(32), self._vendors)
        self._process = await asyncio.to_thread(
            subprocess.Popen,
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the proxy, which drains first
        )
        if self._is_stopped:
            return
        try:
            line = await asyncio.wait_for(
                asyncio.to_thread(_introduce, self._process, start_up), self.start_timeout_sec
            )
        except TimeoutError:
            self._process.kill()  # else whoever reads what it says would never be done
            line = b""
        if line != b"ready\n" or self._is_stopped:
            return
        logger.info("the translator is ready (process %s)", self._process.pid)
        self._secret = start_up.secret
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(start_up.socket_path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=None),
            read_bufsize=2**18,
        )

    async def stop(self) -> None:
        """For good. A start that is under way is broken off: there is nothing yet to end in order."""
        self._is_stopped = True
        if self._starting is not None:
            if self._process is not None:
                self._process.kill()
            await asyncio.wait([self._starting])
        await self._close()

    async def _close(self) -> None:
        session, self._session = self._session, None
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if session is not None:
            await session.close()
        if process is not None:
            await asyncio.to_thread(_end, process)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _introduce(process: subprocess.Popen[bytes], start_up: StartUp) -> bytes:
    """Say what it needs to know; gives its answer, empty where it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(start_up.line())
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its stdin ends, so it ends; if not, it is ended."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue
    try:
        process.wait(STOP_TIMEOUT_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
