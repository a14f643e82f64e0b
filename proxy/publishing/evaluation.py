"""The evaluation gate: a command of the operator's that looks at a version before it serves anybody.

Owns how the command is run, what it is told, and what its end means. It reaches the version through a door
(evaluation_door.py) like any agent; what becomes of the version is candidates.py's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from ...errors import SettingsError
from ...records import PolicyVersion
from ...settings.proxy import EvaluationSettings

KEPT_BYTES = 4096
"""Of the command's output, stdout and stderr as they came: its end, kept in the verdict."""
MAX_STDOUT_BYTES = 256 * 1024
"""Of stdout alone, in which the numbers are looked for."""
MAX_NUMBERS = 64
LOOK_SEC = 1.0
_EXIT_POLL_SEC = 0.2
_LAST_WORDS_SEC = 2.0
_SECRETS = ("LIGHTNING_PROXY_TOKEN", "LIGHTNING_PROXY_ENGINE_API_KEY")


@dataclass(frozen=True, slots=True)
class Door:
    """Where the version answers, and to whom. `episode_id`: of calls that name none."""

    base_url: str
    key: str
    episode_id: str


OpenDoor = Callable[[PolicyVersion, str], AbstractAsyncContextManager[Door]]
"""(version, the engine's name of it) -> a door that is open inside the block."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went. `exit_code` None: it was ended at its time-out; negative: by that signal."""

    exit_code: int | None
    seconds: float
    output: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the gate found; `doc` is kept in the verdict. `reason` None: the version passes."""

    reason: str | None
    doc: Mapping[str, Any]


def check_command(command: str) -> None:
    """SettingsError for a program that is not there: found out now, not at the first version."""
    program = shlex.split(command)[0]
    if shutil.which(program) is None:
        raise SettingsError(
            f"setting 'evaluation.command': no program {program!r} is found; give its path, or mend PATH"
        )


class Evaluation:
    """The gate of one proxy."""

    def __init__(self, settings: EvaluationSettings, open_door: OpenDoor) -> None:
        self.timeout_sec = settings.timeout_sec
        self._command = settings.command
        self._open_door = open_door

    async def run(
        self, version: PolicyVersion, model: str, still_there: Callable[[], Awaitable[None]]
    ) -> Evaluated:
        """`still_there` is asked every second, and raises where it is of no use to go on."""
        async with self._open_door(version, model) as door:
            told = {
                "OPENAI_BASE_URL": door.base_url,
                "OPENAI_API_KEY": door.key,
                "OPENAI_MODEL": version.policy,
                "LIGHTNING_POLICY": version.policy,
                "LIGHTNING_VERSION": str(version.version),
                "LIGHTNING_EPISODE": door.episode_id,
            }
            environment = {name: value for name, value in os.environ.items() if name not in _SECRETS} | told
            command = run_command(shlex.split(self._command), environment, self.timeout_sec)
            ran = await _watched(asyncio.create_task(command), still_there)
        doc = {
            "command": self._command,
            "exit_code": ran.exit_code,
            "seconds": round(ran.seconds, 3),
            "numbers": dict(ran.numbers),
            "output": ran.output,
            "episode": door.episode_id,
        }
        return Evaluated(self._why_not(ran), doc)

    def _why_not(self, ran: Ran) -> str | None:
        if ran.exit_code == 0:
            return None
        if ran.exit_code is None:
            how = f"did not end within {self.timeout_sec:g} s"
        elif ran.exit_code < 0:
            how = f"was ended by signal {-ran.exit_code}"
        else:
            how = f"ended with exit code {ran.exit_code}"
        said = next((line.strip() for line in reversed(ran.output.splitlines()) if line.strip()), "")
        return f"its evaluation {how}" + (f": {said[:300]}" if said else "")


async def _watched(running: asyncio.Task[Ran], still_there: Callable[[], Awaitable[None]]) -> Ran:
    try:
        while True:
            await asyncio.wait({running}, timeout=LOOK_SEC)
            if running.done():
                return running.result()
            await still_there()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def run_command(argv: Sequence[str], environment: Mapping[str, str], timeout_sec: float) -> Ran:
    """Run it without a shell, in a process group of its own, which is killed at the end, however it ends."""
    started = time.monotonic()
    try:
        process = await _started(argv, environment)
    except OSError as error:
        return Ran(127, 0.0, f"{argv[0]}: {error.strerror}", {})
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    both, stdout = bytearray(), bytearray()
    readers = [
        asyncio.create_task(_copy(process.stdout, (both, KEPT_BYTES), (stdout, MAX_STDOUT_BYTES))),
        asyncio.create_task(_copy(process.stderr, (both, KEPT_BYTES))),
    ]
    try:
        has_ended = await _has_ended(process, timeout_sec)
    finally:
        _kill(process)
        await asyncio.wait(readers, timeout=_LAST_WORDS_SEC)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _LAST_WORDS_SEC)
    seconds = time.monotonic() - started
    output = both.decode("utf-8", "replace").replace("\x00", "\ufffd")
    numbers = numbers_in(stdout.decode("utf-8", "replace"))
    return Ran(process.returncode if has_ended else None, seconds, output, numbers)


async def _started(argv: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            _kill(await starting)  # it may have children by now, of which asyncio knows nothing
        raise


def _kill(process: asyncio.subprocess.Process) -> None:
    """And its children, also after its own end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _has_ended(process: asyncio.subprocess.Process, timeout_sec: float) -> bool:
    """False at the time-out. `wait` alone may wait for a grandchild that holds the pipes."""
    deadline = time.monotonic() + timeout_sec
    waiting = asyncio.create_task(process.wait())
    try:
        while process.returncode is None:
            left_sec = deadline - time.monotonic()
            if left_sec <= 0:
                return False
            await asyncio.wait({waiting}, timeout=min(_EXIT_POLL_SEC, left_sec))
        return True
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _copy(pipe: asyncio.StreamReader, *kept: tuple[bytearray, int]) -> None:
    while data := await pipe.read(65536):
        for buffer, limit in kept:
            buffer.extend(data)
            del buffer[:-limit]


def numbers_in(stdout: str) -> dict[str, float]:
    """The numbers of the last line that is a JSON object with any."""
    for line in reversed(stdout.splitlines()):
        if not line.lstrip().startswith("{"):
            continue
        try:
            doc = json.loads(line)
        except ValueError:
            continue
        found = {name: value for name, value in doc.items() if _is_number(value)}
        if found:
            return dict(list(found.items())[:MAX_NUMBERS])
    return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
