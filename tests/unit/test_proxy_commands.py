"""`lightning proxy serve`: mistakes get one line and exit code 2; a signal ends it cleanly."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app


def serve(*flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["proxy", "serve", "--port", "0", *flags])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine-url", "http://127.0.0.1:9"], "lightning engine serve"),
        (["--host", "0.0.0.0"], "LIGHTNING_PROXY_TOKEN"),
        (["--db", "sqlite:////no/such/folder/log.db"], "/no/such/folder"),
        (["--durability", "maybe"], "durability"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
    ],
)
def test_mistakes(flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = serve(*flags)
    assert code == 2
    assert words in said
    assert said.count("\n") == 1


def test_an_address_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_PROXY_TOKEN", "secret")
    code, said = serve("--host", "203.0.113.1", "--no-engine-check")
    assert code == 2
    assert "choose another --host" in said


def test_a_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = serve("--port", port, "--no-engine-check")
    assert code == 2
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--port", "0", "--no-engine-check"]
    process = subprocess.Popen(
        [*command, "--engine-url", "http://127.0.0.1:9"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready: set OPENAI_BASE_URL=http://127.0.0.1:")
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, -number)
    assert "Traceback" not in errors
