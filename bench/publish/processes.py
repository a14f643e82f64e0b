"""The processes of the bench: vLLM as `lightning engine serve` starts it, and proxies as a user starts them.

Both can be killed outright: an engine dies with all its workers, a proxy without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from lightning_rl.engine.child import Child
from lightning_rl.engine.launch import ServeOptions, command, environment
from lightning_rl.engine.preflight import look_at_machine

START_TIMEOUT_SEC = 300.0
KV_CACHE_GIB = "1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """One vLLM on a port of its own, float32, with adapters and reload; killed and started at will."""

    def __init__(self, model: Path, log: Path, *, max_model_len: int = 1024) -> None:
        self._options = ServeOptions(
            model=model.resolve(), port=free_port(), lora=True, dtype="float32", max_model_len=max_model_len
        )
        self._log = log
        self._child: Child | None = None
        self._began = 0.0
        self.url = self._options.url

    def start(self) -> None:
        """Returns at once."""
        machine = look_at_machine()
        given = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB}
        extra = {**environment(self._options, machine, given), "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB}
        # This process binds its own threads; vLLM finds the cores by itself.
        extra |= {"VLLM_SERVER_DEV_MODE": "1"}
        self._began = time.monotonic()
        self._child = Child.start(command(self._options, machine), extra, self._log)

    async def ready(self) -> float:
        """Wait until it answers; gives the seconds since its start."""
        child = self._running
        await asyncio.to_thread(child.wait_ready, self.url, _ignore, _ignore)
        await asyncio.to_thread(child.mend, self.url)
        return time.monotonic() - self._began

    @property
    def _running(self) -> Child:
        assert self._child is not None, "start it first"
        return self._child

    def kill(self) -> None:
        """At this very instant, its workers too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _ignore(_: str) -> None:
    pass


class Proxy:
    """`lightning proxy serve` in a process of its own, or `unchecked.py` (see there) instead."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log

    @classmethod
    async def start(cls, log: Path, db: str, engine_urls: list[str], *, switched_off: str = "") -> Proxy:
        """`switched_off`: what unchecked.py leaves out; nothing: the product as it is."""
        command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve"]
        if switched_off:
            command = [sys.executable, str(Path(__file__).with_name("unchecked.py")), switched_off]
        command += ["--port", "0", "--db", db]
        for url in engine_urls:
            command += ["--engine-url", url]
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the bench, which ends it itself
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_SEC):
                line = (await process.stdout.readline()).decode()
                while line and not line.startswith("ready: "):
                    line = (await process.stdout.readline()).decode()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if not line:
            raise RuntimeError(f"a proxy did not start, see {log}")
        return cls(process, line.strip().rpartition("=")[2].removesuffix("/v1"), log)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(30):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
