"""The running vLLM: started in a process group of its own, watched until it is ready, ended with its workers.

Owns the child process and its log file. Knows what vLLM writes into its log at each phase, and which of its
last lines says why it died; not which options it was started with.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..errors import EngineError

Listener = Callable[[str], None]

POLL_SEC = 0.25
GRACE_SEC = 15.0

# In the order in which vLLM comes to them; the last one that its log shows is where it is.
_PHASES: tuple[tuple[str, str], ...] = (
    (r"Starting to load model|Loading safetensors", "loading weights"),
    (r"Loading weights took", "warming up"),
    (r"Dynamo bytecode transform|Compiling a graph|saved AOT compiled", "compiling"),
    (r"Capturing (CUDA|cudagraph)|Graph capturing", "capturing CUDA graphs"),
    (r"Warming up done|init engine \(", "starting the server"),
)

_ADVICE: tuple[tuple[str, str], ...] = (
    (r"address already in use", "choose another --port"),
    (r"unrecognized arguments|invalid choice|expected one argument", "see what you gave after --"),
    (r"invalid tool call parser", "choose another --tool-call-parser"),
    (
        r"No available memory for the cache|KV cache is needed|larger than the maximum number of tokens",
        "give a smaller --max-model-len, or set VLLM_CPU_KVCACHE_SPACE (GiB)",
    ),
    (
        r"out of memory|MemoryError|Cannot allocate memory",
        "free memory, or give a smaller --max-model-len or --dtype bfloat16",
    ),
    (r"torchvision|torchaudio|torchcodec", "pip uninstall -y torchvision torchaudio torchcodec"),
    (
        r"Free memory on device",
        "another process uses the GPU: end it, or add -- --gpu-memory-utilization 0.5",
    ),
    (
        r"libcuda|CUDA driver|no NVIDIA|Failed to infer device type",
        "without a GPU install 'lightning-rl[engine-cpu]' instead of 'lightning-rl[engine]'",
    ),
    (r"[Ss]afetensor|header too large|HeaderTooSmall", "a weight file is damaged: fetch it anew"),
    (r"lora_rank|LoRA rank", "give a larger --max-lora-rank"),
)

# Follow-ups of the real cause, which stands further up.
_GENERIC = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|SystemExit|"
    r"EngineCore encountered|See root cause|cancelled|KeyboardInterrupt|BrokenPipe|EOFError"
)
_NOISE = re.compile(r"resource_tracker|warnings\.warn|leaked|nanobind|skipped remainder")
_CAUSE = re.compile(
    r"(?:^|\s)((?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception|Fault)\b: .+"
    r"|(?:api_server\.py|vllm serve): error: .+)$"
)
_PREFIX = re.compile(r"^\(\w[^)]*pid=\d+\)\s*(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\]\s*)?")


class Child:
    """vLLM as a child process. `start` it, `wait_ready`, `wait`, and always `end` it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    def start(cls, command: Sequence[str], extra_env: Mapping[str, str], log: Path) -> Child:
        """Raises EngineError when the log can't be written."""
        try:
            out = log.open("wb")
        except OSError as error:
            reason = error.strerror
            raise EngineError(f"can't write the engine's log {log}: {reason}; choose another --log") from None
        with out:
            process = subprocess.Popen(
                command,
                env={**os.environ, **extra_env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches us, and we end it in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait_ready(self, url: str, on_phase: Listener, on_log: Listener) -> None:
        """Wait until /health answers. Raises EngineError with the log's last meaningful line if vLLM dies."""
        with self.log.open("rb") as lines:
            on_phase("starting Python")
            while not _answers(url):
                if self.exit_code() is not None:
                    self._follow(lines, on_phase, on_log)
                    raise self.died("vLLM did not start")
                self._follow(lines, on_phase, on_log)
                time.sleep(POLL_SEC)
            self._follow(lines, on_phase, on_log)

    def mend(self, url: str) -> None:
        """Have our extension of the worker do what it can; an engine that was started without it is left."""
        body = json.dumps({"method": "lightning_mend_prompt_logprobs", "kwargs": {}}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/collective_rpc", body, headers)
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=60):
            pass

    def wait(self, on_log: Listener) -> None:
        """Wait for the end that nobody asked for. Raises EngineError when it comes."""
        with self.log.open("rb") as lines:
            lines.seek(0, os.SEEK_END)
            while self.exit_code() is None:
                _copy(lines, on_log)
                time.sleep(POLL_SEC)
        raise self.died("vLLM has died")

    def end(self) -> None:
        """Ask it to end, then end its whole process group. Harmless when it is gone."""
        if self.exit_code() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SEC)
        # Workers that have outlived their parent belong to the group as well.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def died(self, what: str) -> EngineError:
        code = self.exit_code()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            what += f" (killed by {name}{', perhaps for lack of memory' if name == 'SIGKILL' else ''})"
        text = self.log.read_text("utf-8", "replace")
        cause = last_meaningful_line(text)
        if code == 0 and not causes_in(text):
            return EngineError(f"{what}: it was stopped by somebody else (log: {self.log})")
        advice = advice_for(cause)
        return EngineError(f"{what}: {cause}" + (f"; {advice}" if advice else "") + f" (log: {self.log})")

    def _follow(self, lines: IO[bytes], on_phase: Listener, on_log: Listener) -> None:
        for line in _copy(lines, on_log):
            phase = phase_of(line)
            if phase is not None:
                on_phase(phase)


def phase_of(line: str) -> str | None:
    """Which phase of its start vLLM is in when it writes this line; None if the line does not say."""
    for pattern, phase in reversed(_PHASES):
        if re.search(pattern, line):
            return phase
    return None


def last_meaningful_line(log: str) -> str:
    """The line of vLLM's log that says why it died: its last error that is not the echo of an earlier one."""
    if causes := causes_in(log):
        return causes[-1][:300]
    lines = _lines_of(log)
    said = [line for line in lines if line and not _NOISE.search(line)]
    return said[-1][:300] if said else "it wrote nothing"


def causes_in(log: str) -> list[str]:
    """Errors that the log names, in their order, the echoes of others left out."""
    told = [line for line in _lines_of(log) if not _GENERIC.search(line)]
    return [found.group(1) for line in told if (found := _CAUSE.search(line))]


def _lines_of(log: str) -> list[str]:
    return [_PREFIX.sub("", line).strip() for line in log.splitlines()]


def advice_for(cause: str) -> str | None:
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), None)


def _copy(lines: IO[bytes], on_log: Listener) -> list[str]:
    """Complete lines that came since the last look."""
    found: list[str] = []
    while True:
        at = lines.tell()
        raw = lines.readline()
        if not raw.endswith(b"\n"):
            lines.seek(at)
            return found
        line = raw.decode("utf-8", "replace").rstrip()
        on_log(line)
        found.append(line)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _die_with_parent() -> None:
    """Runs in the child before vLLM: Linux sends it SIGTERM when we are gone, however we ended."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
