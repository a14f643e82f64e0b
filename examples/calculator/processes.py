"""Child processes of the demo: started in groups of their own, ended whatever happens to their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    # Linux: a demo that is killed outright still takes its children along. Elsewhere: only clean exits do.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One `lightning …` command with its output in a log file."""

    def __init__(self, name: str, arguments: Sequence[str], logs: Path) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        command = [sys.executable, "-m", "lightning_rl.cli", *arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads here when children start
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def check(self) -> None:
        """Raise if the child has ended."""
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise RuntimeError(
                f"{self.name} ended with code {self.process.returncode}: {last} (see {self.log})"
            )

    def stop(self, patience_sec: float = 20) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_sec)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Children:
    """`with Children(logs) as children:` ends every child, the newest first, on the way out."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._children: list[Child] = []

    def start(self, name: str, *arguments: str) -> Child:
        child = Child(name, arguments, self.logs)
        self._children.append(child)
        return child

    def check(self) -> None:
        for child in self._children:
            child.check()

    def wait_ready(self, url: str, what: str, timeout_sec: float = 300) -> None:
        """Wait until `url` answers 200; fail at once when a child has ended."""
        until = time.monotonic() + timeout_sec
        while time.monotonic() < until:
            self.check()
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(url, timeout=2) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.3)
        raise RuntimeError(f"{what} did not become ready within {timeout_sec:.0f} s (see {self.logs})")

    def __enter__(self) -> Children:
        def leave(number: int, _frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGHUP, leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.stop()
