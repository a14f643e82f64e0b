"""A real proxy process that is told to end: what runs finishes, what is cut off is recorded as such."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.fake_vllm import FakeVllm, serving

from lightning_rl.store.database import Database

pytestmark = pytest.mark.slow  # starts processes that take seconds

PATH = "/episodes/e/v1/chat/completions"
BODY = json.dumps({"model": "base", "stream": True, "messages": [{"role": "user", "content": "hi"}]})


@dataclass
class Proxy:
    process: subprocess.Popen[str]
    url: str
    log: Path

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def call(self) -> dict[str, Any]:
        database = Database.open(f"sqlite:///{self.log}")
        try:
            with database.read() as conn:
                (row,) = conn.exec_driver_sql("SELECT * FROM calls").mappings()
                return dict(row)
        finally:
            database.close()


@dataclass
class Stream:
    """One streamed answer, read in a thread."""

    url: str
    received: bytes = b""
    is_whole: bool = False
    has_begun: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError), contextlib.closing(connection):
            connection.request("POST", PATH, BODY, {"content-type": "application/json"})
            response = connection.getresponse()
            while part := response.read1(4096):
                self.received += part
                self.has_begun.set()
            self.is_whole = True
        self.has_begun.set()


@contextlib.contextmanager
def serve(tmp_path: Path, engine: FakeVllm, drain_timeout_sec: int) -> Iterator[Proxy]:
    log = tmp_path / "log.db"
    config = tmp_path / "proxy.toml"
    config.write_text(f"drain_timeout_sec = {drain_timeout_sec}\n")
    with serving(engine) as engine_url:
        flags = ["--port", "0", "--no-publish", "--engine-url", engine_url, "--db", f"sqlite:///{log}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--config", str(config), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("ready: "), said
            yield Proxy(process, said.partition("=")[2].strip().removesuffix("/v1"), log)
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def streaming(url: str) -> Iterator[Stream]:
    stream = Stream(url)
    thread = threading.Thread(target=stream.read)
    thread.start()
    try:
        assert stream.has_begun.wait(30)
        yield stream
    finally:
        thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_answers_finish_and_nobody_else_is_let_in(tmp_path: Path, number: signal.Signals) -> None:
    engine = FakeVllm(num_tokens=20, chunk_delay_sec=0.1)
    with serve(tmp_path, engine, drain_timeout_sec=60) as proxy:
        with streaming(proxy.url) as stream:
            proxy.process.send_signal(number)
            assert proxy.process.stderr is not None
            assert "finishing 1 running calls" in proxy.process.stderr.readline()
            while not stream.is_whole:  # the listening socket goes within moments, the stream takes seconds
                late = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=5)
                try:
                    late.connect()
                except ConnectionError:
                    break
                finally:
                    late.close()
            assert not stream.is_whole
        assert proxy.end()[0] == 0
        assert stream.is_whole
        assert stream.received.endswith(b"data: [DONE]\n\n")
        row = proxy.call()
    assert (row["status"], row["delivered"]) == ("complete", 1)


def test_answers_that_take_too_long_are_cut_off_and_recorded_as_such(tmp_path: Path) -> None:
    engine = FakeVllm(num_tokens=100_000, chunk_delay_sec=0.05)
    with serve(tmp_path, engine, drain_timeout_sec=1) as proxy:
        with streaming(proxy.url) as stream:
            proxy.process.send_signal(signal.SIGTERM)
            code, errors = proxy.end()
        assert code == 0
        assert "Traceback" not in errors
        assert not stream.is_whole
        row = proxy.call()
    assert (row["status"], row["delivered"], row["error"]) == ("aborted", 0, "the proxy was stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    engine = FakeVllm(num_tokens=100_000, chunk_delay_sec=0.05)
    with serve(tmp_path, engine, drain_timeout_sec=3600) as proxy:
        with streaming(proxy.url):
            proxy.process.send_signal(number)
            assert proxy.process.stderr is not None
            assert "a second signal cuts them off" in proxy.process.stderr.readline()
            proxy.process.send_signal(number)
            code, errors = proxy.end()
        assert code == 0
        assert "Traceback" not in errors
        row = proxy.call()
    assert (row["status"], row["delivered"]) == ("aborted", 0)
