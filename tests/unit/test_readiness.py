"""When the proxy says that it is ready, and what it says while the log does not answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes.fake_vllm import FakeVllm, serving
from fakes.running_proxy import ask
from fakes.waiting import wait_until

from lightning_rl.proxy import readiness
from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.readiness import tell_stalls, when_ready
from lightning_rl.proxy.recorder import STALLED


@dataclass
class Log:
    fault: str | None = None
    refusal: str | None = None


@dataclass
class Proxy:
    recorder: Log = field(default_factory=Log)
    live: LivePolicies = field(default_factory=lambda: LivePolicies("policy", {}, Gate()))
    engines: Engines = field(default_factory=lambda: Engines(["http://engine"]))


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_ready_is_said_when_calls_are_served_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readiness, "SAY_AFTER_SEC", 0.0)
    said: list[str] = []

    async def scenario() -> None:
        proxy = Proxy()
        proxy.live.gate.hold()
        task = asyncio.create_task(when_ready(proxy, lambda: said.append("ready"), look_sec=0))
        await turns()
        assert not said
        proxy.live.set_base_model("base")
        await turns()
        assert not said, "the gate holds calls"
        proxy.live.gate.open()
        await task

    asyncio.run(scenario())
    assert said == ["ready"]
    assert [record.message for record in caplog.records] == [
        f"not ready yet, calls wait: {readiness.NO_ENGINE}"
    ]


def test_a_log_that_does_not_answer_is_told_once_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        proxy = Proxy()
        task = asyncio.create_task(tell_stalls(proxy, look_sec=0))
        for fault, refusal in (
            (None, None),
            (STALLED, STALLED),
            ("the file's lock", "the file's lock"),  # what the recorder says itself
            (None, None),
            (STALLED, None),
            (None, None),
        ):
            proxy.recorder.fault, proxy.recorder.refusal = fault, refusal
            await turns()
        task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.message for record in caplog.records] == [
        f"the log can't be written: {STALLED}; calls are refused meanwhile",
        "the log answers again",
        f"the log can't be written: {STALLED}; calls are served, and recorded later meanwhile",
        "the log answers again",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_ready_means_healthy_and_best_effort_serves_though_the_log_is_locked_from_then_on(
    tmp_path: Path, workers: str
) -> None:
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0"]
    command += ["--db", f"sqlite:///{tmp_path}/log.db", "--recording", "best-effort", "--workers", workers]
    with serving(FakeVllm()) as engine_url, (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--engine-url", engine_url], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split("=")[1].strip().removesuffix("/v1")
            assert ask(url, "/healthz").status == 200
            if workers == "1":
                lock = sqlite3.connect(tmp_path / "log.db", isolation_level=None, timeout=30)
                lock.execute("BEGIN IMMEDIATE")
                assert ask(url, "/v1/chat/completions", body).status == 200  # while it is locked
                wait_until(lambda: "the log can't be written" in (tmp_path / "errors").read_text())
                lock.execute("ROLLBACK")
                lock.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
