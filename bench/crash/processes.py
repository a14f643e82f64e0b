"""The processes of the crash test: the engine, proxies as a user starts them, a Postgres server to crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_TIMEOUT_SEC = 120.0


class Proxy:
    """`lightning proxy serve` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    @classmethod
    async def start(cls, folder: Path, db: str, engine_url: str, durability: str) -> Proxy:
        errors = (folder / "proxy.err").open("ab")
        command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0", "--no-publish"]
        command += ["--db", db, "--engine-url", engine_url, "--durability", durability]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the test, which ends it itself
        )
        errors.close()
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
            raise RuntimeError(f"a proxy did not start:\n{(folder / 'proxy.err').read_text()[-2000:]}")
        return cls(process, line.strip().rpartition("=")[2])

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        """At this very instant, without a word."""
        self._process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """As an operator does: it finishes what is running."""
        self._process.terminate()

    async def gone(self) -> None:
        await self._process.wait()


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[tuple[str, Path]]:
    """Its root URL and its record file."""
    port_file, record = folder / "engine.port", folder / "engine.jsonl"
    record.touch()
    command = [sys.executable, str(Path(__file__).parent / "engine.py"), str(port_file), str(record)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_SEC
        while not port_file.exists() or not port_file.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the engine of the crash test did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}", record
    finally:
        process.terminate()
        process.wait(30)
