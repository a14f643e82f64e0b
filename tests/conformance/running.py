"""The replaying engine and, in a process of its own as a user starts it, the proxy in front of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lightning_rl.store.database import Database
from lightning_rl.tests.conformance.replay import Asked, ReplayEngine, Reply, replaying
from lightning_rl.tests.conformance.substitutions import MARK
from lightning_rl.tests.conformance.wire import Question, ask_all

MODELS = b'{"object":"list","data":[{"id":"base","object":"model","root":"/m","parent":null}]}'

Address = tuple[str, int]


@dataclass
class Running:
    engine: ReplayEngine
    engine_address: Address
    address: Address
    database: Database
    answers: dict[bytes, Callable[[Asked], Reply]]  # by the mark that a case's requests carry
    asked: dict[bytes, list[Asked]]
    errors: Path  # what the proxy said

    def traceback(self) -> str | None:
        """The proxy's first one, if it wrote any."""
        text = self.errors.read_text()
        at = text.find("Traceback")
        return None if at < 0 else text[max(0, at - 200) : at + 4000]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Running]:
    engine = ReplayEngine()
    answers: dict[bytes, Callable[[Asked], Reply]] = {}
    asked: dict[bytes, list[Asked]] = {}

    def answer(request: Asked) -> Reply:
        marks = request.values(MARK)
        if marks:
            return answers[marks[0]](request)
        if request.target == "/v1/models":  # the proxy itself, looking after its engine
            return Reply(blocks=(MODELS,))
        if request.target == "/version":
            return Reply(blocks=(b'{"version":"0.32.0"}',))
        return Reply(b"HTTP/1.1 404 Not Found", blocks=(b'{"detail":"Not Found"}',))

    engine.answer = answer
    engine.is_early = lambda request: (request.values(MARK) or [b""])[0].startswith(b"early-")
    engine.note = lambda request: asked.setdefault((request.values(MARK) or [b""])[0], []).append(request)
    with (
        replaying(engine) as engine_address,
        proxy_process(folder, "http://{}:{}".format(*engine_address)) as (address, database),
    ):
        yield Running(engine, engine_address, address, database, answers, asked, folder / "proxy.err")


@contextlib.contextmanager
def proxy_process(folder: Path, engine_url: str) -> Iterator[tuple[Address, Database]]:
    """`lightning proxy serve` with a new log; its address and that log."""
    url = f"sqlite:///{folder}/log.db"
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0", "--db", url]
    command += ["--engine-url", engine_url, "--no-publish"]
    with (
        (folder / "proxy.err").open("w") as errors,
        started(command, errors, "ready: ") as line,
    ):
        root = urlsplit(line.partition("=")[2].strip())
        assert root.hostname is not None
        assert root.port is not None
        database = Database.open(url)
        _wait_until_healthy((root.hostname, root.port))
        try:
            yield (root.hostname, root.port), database
        finally:
            database.close()


def _wait_until_healthy(address: Address) -> None:
    """Until the proxy has seen its engine: before, the list of models lacks the policy."""
    deadline = time.monotonic() + 30
    while not ask_all(address, [Question("GET", "/healthz", ())])[0].status_line.startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < deadline, "the proxy does not find its engine"
        time.sleep(0.02)


@contextlib.contextmanager
def started(command: list[str], errors: object, says: str) -> Iterator[str]:
    """A process that says in a line that it is ready, and ends in order when it is told to."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
    )  # type: ignore[call-overload]
    try:
        line = process.stdout.readline()
        assert line.startswith(says), f"{command[3:6]} did not start: {line}"
        yield line
    finally:
        process.terminate()
        code = process.wait(90)
        process.stdout.close()
    assert code == 0, f"{command[3:6]} ended with {code}"
