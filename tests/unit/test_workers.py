"""`lightning proxy serve --workers 2`, as a real process in front of the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_vllm import FakeVllm, serving
from fakes.running_proxy import ask
from fakes.waiting import wait_until

from lightning_rl.proxy import workers
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store import fleet as rows
from lightning_rl.store.database import Database

pytestmark = pytest.mark.slow  # starts processes that take seconds

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()


@contextlib.contextmanager
def two_workers(folder: Path, engine_url: str) -> Iterator[tuple[subprocess.Popen[str], str, Database]]:
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0", "--workers", "2"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--engine", engine_url, "--db", f"sqlite:///{folder}/log.db"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: set OPENAI_BASE_URL="), (folder / "errors").read_text()
        database = Database.open(f"sqlite:///{folder}/log.db")
        yield process, line.split("=")[1].strip().removesuffix("/v1"), database
        database.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert "Traceback" not in (folder / "errors").read_text()


def living(database: Database) -> set[int]:
    with database.read() as conn:
        return {row.pid for row in rows.view(conn).fresh(2500)}


def wait_for_workers(database: Database, without: int | None = None) -> set[int]:
    wait_until(lambda: len(living(database) - {without}) >= 2)
    return living(database) - {without}


def test_both_workers_record_and_a_signal_lets_running_calls_end(tmp_path: Path) -> None:
    engine = FakeVllm(answer_delay_sec=0.05)
    with (
        serving(engine) as engine_url,
        two_workers(tmp_path, engine_url) as (process, url, database),
        ThreadPoolExecutor(16) as pool,
    ):
        wait_for_workers(database)
        status = json.loads(ask(url, "/lightning/api/status").body)
        assert sorted(proxy["publishes"] for proxy in status["proxies"]) == [False, True]
        answers = list(pool.map(lambda i: ask(url, f"/episodes/e{i % 7}{CHAT}", BODY).status, range(64)))
        assert answers == [200] * 64
        engine.answer_delay_sec = 1.0
        late = [pool.submit(ask, url, f"/episodes/late{i}{CHAT}", BODY) for i in range(4)]
        wait_until(lambda: engine.num_open >= 4)
        process.send_signal(signal.SIGTERM)
        assert [answer.result().status for answer in late] == [200] * 4
        assert process.wait(60) == 0
        with database.read() as conn:
            statuses = conn.exec_driver_sql("SELECT status, delivered FROM calls").all()
            versions = conn.exec_driver_sql("SELECT DISTINCT policy_version FROM calls").all()
            unknown = conn.exec_driver_sql("SELECT count(*) FROM calls WHERE fingerprint_id IS NULL").scalar()
            assert rows.view(conn).proxies == ()
            assert rows.view(conn).owner is None
        assert statuses == [("complete", 1)] * 68
        assert versions == [(0,)]
        assert unknown == 0


def test_a_killed_worker_is_replaced_and_the_other_goes_on(tmp_path: Path) -> None:
    with (
        serving(FakeVllm()) as engine_url,
        two_workers(tmp_path, engine_url) as (_, url, database),
    ):
        victim = min(wait_for_workers(database))
        os.kill(victim, signal.SIGKILL)
        assert [ask(url, f"/episodes/e{i}{CHAT}", BODY).status for i in range(10)] == [200] * 10
        assert victim not in wait_for_workers(database, without=victim)
        assert "it is started again" in (tmp_path / "errors").read_text()
        assert ask(url, f"/episodes/after{CHAT}", BODY).status == 200


def test_a_signal_while_a_worker_is_being_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    ended: list[int] = []

    class Process:
        """A worker at whose start the signal comes."""

        def __init__(self, **_: Any) -> None:
            self.pid = 10 + len(started)
            started.append(self)
            self.sentinel, self.exitcode = os.pipe()[0], 0

        def start(self) -> None:
            if len(started) == 2:
                under_test._on_signal(signal.SIGTERM, None)

        def is_alive(self) -> bool:
            return self.pid not in told

        def join(self) -> None:
            assert self.pid in told, "waited for ever"
            ended.append(self.pid)

    started: list[Process] = []
    monkeypatch.setattr(workers.os, "kill", lambda pid, _: told.append(pid))
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    under_test = workers.Workers(ProxySettings.load(workers=2), socket.socket(), lambda *_: None)
    monkeypatch.setattr(under_test._context, "Process", Process)
    under_test.run(lambda: None)
    assert (sorted(told), ended) == ([10, 11], [10, 11])
