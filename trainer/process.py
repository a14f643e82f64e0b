"""The process that a run is: what its numbers may hang on, and the signals that end it."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from typing import Any

from ..errors import RankLostError
from .launch import LAUNCHED, RANK_LOST, num_ranks

INTERRUPTED = 130
"""Exit status of a run that a signal has ended."""


def environment(on_gpu: bool) -> dict[str, str]:
    """What a run's numbers may hang on."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate", "lightning-rl")
    found = {name: installed_version(name) for name in packages}
    return found | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cuda" if on_gpu else "cpu",
        "processes": str(num_ranks()),
    }


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt; the second of them ends the process at once, as a crash
    would. In a rank that we have launched, SIGTERM says that another one has ended.

    Signals reach only the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            os._exit(INTERRUPTED)
        seen = True
        if number == signal.SIGTERM and LAUNCHED in os.environ:
            raise RankLostError(RANK_LOST)
        raise KeyboardInterrupt

    had = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in had.items():
            signal.signal(number, handler)
