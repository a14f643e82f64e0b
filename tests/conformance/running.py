"""The replaying engine and, in a process of its own as a user starts it, the proxy in front of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lightning_rl.store.database import Database

from .replay import Asked, ReplayEngine, Reply, replaying
from .substitutions import MARK

MODELS = b'{"object":"list","data":[{"id":"base","object":"model","root":"/m","parent":null}]}'


@dataclass
class Running:
    engine: ReplayEngine
    engine_address: tuple[str, int]
    address: tuple[str, int]
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
def running(folder: Path, **environment: str) -> Iterator[Running]:
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
    url = f"sqlite:///{folder}/log.db"
    with replaying(engine) as engine_address:
        command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0", "--db", url]
        command += ["--engine-url", "http://{}:{}".format(*engine_address), "--no-publish"]
        with (folder / "proxy.err").open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}
            )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("ready: "), (folder / "proxy.err").read_text()
            root = urlsplit(line.partition("=")[2].strip())
            assert root.hostname is not None
            assert root.port is not None
            database = Database.open(url)
            try:
                address = (root.hostname, root.port)
                yield Running(engine, engine_address, address, database, answers, asked, folder / "proxy.err")
            finally:
                database.close()
        finally:
            process.terminate()
            code = process.wait(90)
            process.stdout.close()
        assert code == 0, (folder / "proxy.err").read_text()
