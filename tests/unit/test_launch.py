"""The launch line, what is seen to be missing before it, and what a dead vLLM's log says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_rl.engine import preflight
from lightning_rl.engine.child import Child, advice_for, last_meaningful_line, phase_of
from lightning_rl.engine.launch import GIB, Device, Machine, ServeOptions, command, environment, kv_cache_gib
from lightning_rl.errors import EngineError, UserError

CPU, GPU = Device.CPU, Device.GPU
MODEL = Path("/models/m")


def machine(device: Device = CPU, cores: int = 2, gib: int = 24) -> Machine:
    return Machine(device, tuple(range(cores)), gib * GIB)


def flag(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


# --- the line ---


def test_a_cpu_serves_float32_without_adapters_and_can_reload() -> None:
    line = command(ServeOptions(MODEL), machine())
    assert line[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m"]
    assert flag(line, "--dtype") == "float32"
    assert flag(line, "--logprobs-mode") == "processed_logprobs"
    assert flag(line, "--generation-config") == "vllm"
    assert flag(line, "--served-model-name") == "base"
    assert "--enable-lora" not in line
    assert "--no-enable-chunked-prefill" in line
    assert flag(line, "--worker-extension-cls") == "lightning_rl.engine.worker.ReloadExtension"
    added = environment(ServeOptions(MODEL), machine(), {})
    assert added["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in added
    assert added["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert added["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert added["HF_HUB_OFFLINE"] == added["VLLM_NO_USAGE_STATS"] == added["DO_NOT_TRACK"] == "1"


def test_an_engine_that_may_sleep_has_the_routes_for_it_on_loopback_only() -> None:
    sleeps = ServeOptions(MODEL, sleep=True)
    assert "--enable-sleep-mode" in command(sleeps, machine(GPU))
    assert environment(sleeps, machine(GPU), {})["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--enable-sleep-mode" not in command(ServeOptions(MODEL), machine(GPU))
    assert "VLLM_SERVER_DEV_MODE" not in environment(ServeOptions(MODEL), machine(GPU), {})


def test_sleep_is_refused_where_it_does_nothing_or_is_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="--sleep is for a GPU"):
        preflight.check(ServeOptions(tmp_path, sleep=True), machine(CPU))
    with pytest.raises(UserError, match=r"listen on loopback, not on 0\.0\.0\.0"):
        preflight.check(ServeOptions(tmp_path, sleep=True, host="0.0.0.0"), machine(GPU))


def test_a_small_machine_keeps_its_cores_for_the_answers() -> None:
    line = command(ServeOptions(MODEL), machine(cores=2))
    assert flag(line, "--distributed-executor-backend").endswith(".UniProcExecutor")
    assert environment(ServeOptions(MODEL), machine(cores=2), {})["GOMP_SPINCOUNT"] == "20000"
    split = ServeOptions(MODEL, extra=("--tensor-parallel-size", "2"))
    for other in (command(ServeOptions(MODEL), machine(cores=64)), command(split, machine(cores=2))):
        assert "--distributed-executor-backend" not in other


def test_a_gpu_serves_adapters_and_has_no_development_routes() -> None:
    options = ServeOptions(MODEL, max_loras=4, max_lora_rank=64)
    line = command(options, machine(GPU))
    assert "--enable-lora" in line
    assert flag(line, "--max-loras") == "4"
    assert flag(line, "--max-lora-rank") == "64"
    assert "--dtype" not in line
    assert "--enforce-eager" not in line
    assert "--worker-extension-cls" not in line
    added = environment(options, machine(GPU), {})
    assert added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in added
    assert "VLLM_CPU_KVCACHE_SPACE" not in added


def test_full_weights_on_a_gpu_need_the_development_routes_and_loopback() -> None:
    assert environment(ServeOptions(MODEL, lora=False), machine(GPU), {})["VLLM_SERVER_DEV_MODE"] == "1"
    public = ServeOptions(MODEL, lora=False, host="0.0.0.0")
    assert "VLLM_SERVER_DEV_MODE" not in environment(public, machine(GPU), {})
    assert public.url == "http://127.0.0.1:8000"


def test_what_the_user_says_wins() -> None:
    options = ServeOptions(MODEL, dtype="bfloat16", tool_call_parser=None, extra=("--dtype", "half"))
    line = command(options, machine())
    assert line[-2:] == ["--dtype", "half"]
    assert "--enable-auto-tool-choice" not in line
    given = {"VLLM_CPU_KVCACHE_SPACE": "9", "VLLM_CPU_OMP_THREADS_BIND": "all"}
    added = environment(options, machine(), given)
    assert not added.keys() & given.keys()


def test_many_cores_are_left_to_vllm() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(ServeOptions(MODEL), machine(cores=16), {})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(ServeOptions(MODEL), machine(cores=1), {})


def test_the_cache_takes_an_eighth_within_bounds() -> None:
    assert [kv_cache_gib(gib * GIB) for gib in (0, 4, 24, 64, 1000)] == [1, 1, 3, 8, 16]


# --- before the start ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_folder_is_fine(model: Path) -> None:
    preflight.check_model(model)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(model: Path, missing: str, said: str) -> None:
    (model / missing).unlink()
    with pytest.raises(UserError, match=said):
        preflight.check_model(model)


def test_a_folder_that_is_none_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no such model folder: Qwen/Qwen3-0\.6B; fetch it first: hf download"
    ):
        preflight.check_model(Path("Qwen/Qwen3-0.6B"))
    with pytest.raises(UserError, match=f"no such model folder: {tmp_path}/none$"):
        preflight.check_model(tmp_path / "none")
    with pytest.raises(UserError, match="is a file"):
        preflight.check_model(model / "config.json")
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        preflight.check_model(model)


def test_an_adapter_is_not_a_model(model: Path) -> None:
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a LoRA adapter"):
        preflight.check_model(model)


def test_float32_needs_twice_the_stored_weights(model: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(2 * GIB)  # sparse
    preflight.check_memory(ServeOptions(model), machine(gib=7))  # 4 weights + 1 cache + 1.2
    with pytest.raises(EngineError, match=r"needs about 6\.2 GiB, 6\.0 GiB are free"):
        preflight.check_memory(ServeOptions(model), machine(gib=6))
    preflight.check_memory(ServeOptions(model, dtype="bfloat16"), machine(gib=6))
    preflight.check_memory(ServeOptions(model), machine(gib=0))  # unknown


def test_a_port_in_use_is_said(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"can't listen on 127.0.0.1:{port}: .*choose another --port"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(preflight, "package_version", lambda name: found.get(name.replace("-", "_")))


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch)
    with pytest.raises(EngineError, match=r"lightning-rl\[engine\].*lightning-rl\[engine-cpu\]"):
        preflight.installed_device()
    versions(monkeypatch, vllm="0.32.0")
    assert preflight.installed_device() is GPU
    versions(monkeypatch, vllm_cpu="0.32.0")
    assert preflight.installed_device() is CPU


def test_cuda_builds_beside_a_cpu_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.13.0+cpu")
    with pytest.raises(
        EngineError, match=r"torchvision in .* is a CUDA build.*pip uninstall -y torchvision$"
    ):
        preflight.check_torch_builds()
    versions(monkeypatch, torch="2.13.0", torchvision="0.28.0")
    preflight.check_torch_builds()
    versions(monkeypatch, torch="2.13.0+cpu")
    preflight.check_torch_builds()


# --- its log ---


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("(Worker pid=7) INFO [runner.py:68] Starting to load model /m...", "loading weights"),
        ("(Worker pid=7) INFO [loader.py:501] Loading weights took 1.87 seconds", "warming up"),
        ("INFO [runner.py:9] Graph capturing finished in 4 secs", "capturing CUDA graphs"),
        ("INFO [core.py:402] init engine (profile, create kv cache) took 8 s", "starting the server"),
        ("INFO [core.py:133] Initializing a V1 LLM engine: compilation_config={...}", None),
    ],
)
def test_phases_are_read_off_the_log(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


LOG = """\
INFO:     Started
(Worker pid=9) ERROR 11-30 13:06:43 [executor.py:1063] Traceback (most recent call last):
(Worker pid=9) ERROR 11-30 13:06:43 [executor.py:1063] ValueError: To serve at least one request with \
the model's max seq len (8192), 2.0 GiB KV cache is needed
(EngineCore pid=8) ERROR 11-30 13:06:43 [core.py:1512] RuntimeError: WorkerProc initialization failed. See …
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}
"""


def test_the_cause_is_found_behind_its_echoes() -> None:
    cause = last_meaningful_line(LOG)
    assert cause.startswith("ValueError: To serve at least one request")
    assert "--max-model-len" in str(advice_for(cause))


def test_a_wrong_flag_is_found() -> None:
    cause = last_meaningful_line(
        "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --bogus\n"
    )
    assert cause == "api_server.py: error: unrecognized arguments: --bogus"
    assert advice_for(cause) == "see what you gave after --"


def test_a_child_that_somebody_stopped_is_said_so(tmp_path: Path) -> None:
    child = Child.start([sys.executable, "-c", "print('shutting down')"], {}, tmp_path / "log")
    try:
        with pytest.raises(EngineError, match="vLLM has died: it was stopped by somebody else"):
            child.wait(lambda _: None)
    finally:
        child.end()


def test_a_log_without_an_error_gives_its_last_line() -> None:
    assert last_meaningful_line("two\nwarnings.warn('resource_tracker: There appear to be %d '\n") == "two"
    assert last_meaningful_line("one\ntwo\n\n") == "two"
    assert last_meaningful_line("") == "it wrote nothing"


# --- the child ---

SERVER = """
import http.server, sys, threading, subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("Starting to load model /m", flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_is_gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_child_becomes_ready_and_ends_with_its_workers(tmp_path: Path, free_port: int) -> None:
    child = Child.start([sys.executable, "-c", SERVER, str(free_port)], {}, tmp_path / "log")
    phases: list[str] = []
    lines: list[str] = []
    try:
        child.wait_ready(f"http://127.0.0.1:{free_port}", phases.append, lines.append)
    finally:
        child.end()
    assert phases == ["starting Python", "loading weights"]
    assert lines == ["Starting to load model /m"]
    until = time.monotonic() + 5
    while not group_is_gone(child.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert group_is_gone(child.pid)
    child.end()


def test_a_child_that_dies_says_why(tmp_path: Path, free_port: int) -> None:
    dies = "raise ImportError('libcuda.so.1: cannot open shared object file')"
    child = Child.start([sys.executable, "-c", dies], {}, tmp_path / "log")
    try:
        with pytest.raises(EngineError) as error:
            child.wait_ready(f"http://127.0.0.1:{free_port}", lambda _: None, lambda _: None)
    finally:
        child.end()
    said = str(error.value)
    assert said.startswith("vLLM did not start: ImportError: libcuda.so.1: cannot open shared object file; ")
    assert "lightning-rl[engine-cpu]" in said
    assert str(tmp_path / "log") in said
    assert "\n" not in said


def test_a_killed_child_says_by_what(tmp_path: Path) -> None:
    child = Child.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    os.kill(child.pid, signal.SIGKILL)
    try:
        with pytest.raises(EngineError, match="killed by SIGKILL, perhaps for lack of memory"):
            child.wait(lambda _: None)
    finally:
        child.end()


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="can't write the engine's log"):
        Child.start([sys.executable], {}, tmp_path / "none" / "log")


def test_the_command_says_one_line_and_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_rl.cli", "engine", "serve", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
