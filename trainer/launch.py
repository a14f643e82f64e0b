"""One command, several processes: `lightning train` started again in each rank by accelerate's own launcher.

Knows what accelerate's configuration files and environment say, and which kinds of distribution a run can't
use. What ranks do together is steps/ranks.py's; torch is loaded only where ranks are started.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SettingsError, UserError
from ..settings.train import TrainSettings
from .credit.registry import configure

LAUNCHED = "LIGHTNING_TRAIN_LAUNCHED"
"""Set in ranks that this module has started. There SIGINT is the user's wish to stop, whichever signal the
user sent, and SIGTERM says that another rank has ended."""

RANK_LOST = "another process of this run has ended, so it ends, too; the log and every version are whole"

STOPPED, LOST = 130, 3
"""Exit codes of a rank: stopped by the user; ended because another one had."""

_DEEPSPEED = (
    "DeepSpeed steps its optimizer in every backward pass, and a step here has one for each micro-batch: use "
    "DDP, or FSDP2 (fsdp_version: 2) where the model does not fit on one GPU"
)
_PLAIN = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: {processes}
use_cpu: false
"""


def num_ranks(environment: Mapping[str, str] = os.environ) -> int:
    return int(environment.get("WORLD_SIZE", "1")) if is_launched(environment) else 1


def is_follower(environment: Mapping[str, str] = os.environ) -> bool:
    return num_ranks(environment) > 1 and environment.get("RANK") != "0"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """accelerate launch, torchrun or we have started this process as one of several."""
    return "LOCAL_RANK" in environment and "RANK" in environment


def is_set(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")


def require_supported(*, has_critic: bool, environment: Mapping[str, str] = os.environ) -> None:
    """SettingsError where this process was started for a kind of distribution that a run can't use."""
    sharded = is_set("ACCELERATE_USE_FSDP", environment)
    if is_set("ACCELERATE_USE_DEEPSPEED", environment):
        raise SettingsError(_DEEPSPEED)
    if sharded and environment.get("FSDP_VERSION", "1") != "2":
        raise SettingsError("FSDP 1 is not supported: set fsdp_version: 2 in accelerate's configuration")
    for name, what in (
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism_config (tensor, context or sequence parallel)"),
    ):
        if is_set(name, environment):
            raise SettingsError(f"{what} is not supported: use DDP or FSDP2")
    if sharded and has_critic:
        raise SettingsError(
            "a critic can't be trained beside a sharded policy: use DDP, or a credit rule that reads no "
            "values"
        )


def launch(settings: TrainSettings, arguments: Sequence[str]) -> int | None:
    """Run `lightning ARGUMENTS` in every rank of this machine until all have ended; gives the exit code.

    None: one process is asked for, so this one is the run.
    """
    if settings.accelerate is None and (settings.processes or 1) == 1:
        return None
    has_critic = "values" in configure(settings.credit).reads
    with tempfile.TemporaryDirectory() as folder:
        file = settings.accelerate or _plain(Path(folder), settings.processes or 1)
        config = _config(file)
        _require_supported_config(config, has_critic=has_critic)
        processes = settings.processes or config.num_processes or 1
        if processes == 1:
            _apply_alone(config)
            return None
        return _run(file, processes, config, arguments, on_cpu=_trains_on_cpu(settings, config))


def _plain(folder: Path, processes: int) -> Path:
    file = folder / "ddp.yaml"
    file.write_text(_PLAIN.format(processes=processes))
    return file


def _config(file: Path) -> Any:
    """Accelerate's own reading of its file. UserError with one line."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not file.is_file():
        raise UserError(f"no such accelerate configuration: {file} (configs/accelerate/ holds some)")
    try:
        return load_config_from_file(str(file))
    except Exception as error:  # noqa: BLE001  (YAML's and accelerate's own, of many kinds)
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{file} is no configuration of accelerate: {reason}") from None


def _require_supported_config(config: Any, *, has_critic: bool) -> None:
    kind = _kind(config)
    known = {
        "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
        "FSDP": "ACCELERATE_USE_FSDP",
        "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
    }
    said = {known[kind]: "true"} if kind in known else {}
    said["FSDP_VERSION"] = str(config.fsdp_config.get("fsdp_version", 1))
    said["ACCELERATE_USE_PARALLELISM_CONFIG"] = str(bool(config.parallelism_config))
    require_supported(has_critic=has_critic, environment=said)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        raise SettingsError(f"distributed_type {kind} is not supported: use NO, MULTI_GPU or FSDP")


def _kind(config: Any) -> str:
    return str(getattr(config.distributed_type, "value", config.distributed_type))


def _apply_alone(config: Any) -> None:
    """What a configuration says to a run of one process, which its launcher would have put there."""
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", str(config.mixed_precision or "no"))
    if config.gpu_ids not in (None, "all"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(config.gpu_ids))


def _trains_on_cpu(settings: TrainSettings, config: Any) -> bool:
    import torch

    num_gpus = torch.cuda.device_count()
    if settings.device == "cuda" and not num_gpus:
        raise UserError(
            "device = cuda, but torch sees no GPU: use --device cpu, or install a CUDA build of torch"
        )
    return settings.device == "cpu" or bool(config.use_cpu) or not num_gpus


def _run(file: Path, processes: int, config: Any, arguments: Sequence[str], *, on_cpu: bool) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    num_machines = int(config.num_machines or 1)
    here = max(1, processes // num_machines)
    _require_devices(here, on_cpu=on_cpu)
    flags = ["--config_file", str(file), "--num_processes", str(processes)]
    if num_machines == 1 and config.main_process_port is None:
        flags += ["--main_process_port", "0"]  # any that is free
    if _kind(config) in ("NO", "MULTI_CPU"):
        flags.append("--multi_gpu")
    parsed = launch_command_parser().parse_args([*flags, "--module", "lightning_rl.cli", *arguments])
    # SIGTERM is ours (see LAUNCHED); the launcher hands the others on.
    parsed.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    with _quiet(), _environment(on_cpu), _sigterm_as_sigint():
        try:
            launch_command(parsed)
        except ChildFailedError as error:
            return _exit_code(error.failures, here)
        except SignalException:
            return STOPPED
    return 0


def _require_devices(processes: int, *, on_cpu: bool) -> None:
    import torch

    if not on_cpu and processes > (found := torch.cuda.device_count()):
        raise UserError(
            f"{processes} processes need a GPU each, and torch sees {found}: use --processes {found}"
        )


def _exit_code(failures: Mapping[int, Any], processes: int) -> int:
    """Of the rank that ended the run. What a rank has not said itself is said here, in one line."""
    codes = {rank: int(failure.exitcode) for rank, failure in sorted(failures.items())}
    for rank, code in codes.items():
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (is the memory full?)" if name == "SIGKILL" else ""
            raise UserError(
                f"rank {rank} of {processes} was ended by {name}{hint}, so the run has ended; the log and "
                "every version are whole"
            )
    said = [code for code in codes.values() if code in (2, STOPPED)]
    return said[0] if said else max(codes.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """What the launcher tells of itself goes to nobody: ranks say what is wrong with them."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed", "accelerate")]
    had = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, had, strict=True):
            logger.setLevel(level)


@contextmanager
def _environment(on_cpu: bool) -> Iterator[None]:
    """What every rank inherits."""
    had = dict(os.environ)
    os.environ[LAUNCHED] = "1"
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(had)


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def hand_on(number: int, frame: Any) -> None:
        raise SignalException("stopped", sigval=signal.SIGINT)

    had = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, had)
