"""The processes of one run: started, found ready, measured, ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

READY_SEC = 180
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """A program that listens on `port`; ready when `path` answers 200."""

    def __init__(
        self, command: Sequence[str], port: int, path: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=_plain_environment() | dict(env or {})
            )
        try:
            self._wait_ready(f"http://127.0.0.1:{port}{path}")
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_SEC
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = self._log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"bench-proxy: this did not start: {self._process.args!r}\n{last}")
            time.sleep(0.1)

    def pids(self) -> list[int]:
        """The process and all that it has started."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def rss_mb(self) -> float:
        total_kb = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total_kb += int(line.split()[1])
        return total_kb / 1024

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _plain_environment() -> dict[str, str]:
    """Without what would change the settings of a program under test."""
    ours = ("LIGHTNING_", "LITELLM_", "DATABASE_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def start_engine(folder: Path) -> Server:
    port = free_port()
    return Server(
        [sys.executable, str(HERE / "engine.py"), str(port)], port, "/v1/models", folder / "engine.log"
    )


def start_lightning(folder: Path, engine: Server, database: str) -> Server:
    """As a user starts it: default settings, but for the addresses."""
    port = free_port()
    command = [sys.executable, "-m", "lightning_rl.cli", "proxy", "serve", "--db", database]
    command += ["--engine-url", f"http://127.0.0.1:{engine.port}", "--port", str(port)]
    return Server(command, port, "/v1/models", folder / "lightning.log")


def start_litellm(folder: Path, engine: Server, python: Path, model: str) -> Server:
    """Its proxy server as its documents say for a vLLM backend: one worker, no database, no debug output."""
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        f"  - model_name: {model}\n"
        "    litellm_params:\n"
        f"      model: hosted_vllm/{model}\n"
        f"      api_base: http://127.0.0.1:{engine.port}/v1\n"
        "      api_key: none\n"
    )
    command = [
        str(python.parent / "litellm"),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    env = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # no key to check: in its favour
    }
    return Server([*command, "--telemetry", "False"], port, "/health/liveliness", folder / "litellm.log", env)
