"""The process that a run is: what its numbers may hang on, and the signals that end it."""

from __future__ import annotations

import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from typing import Any


def environment(on_gpu: bool) -> dict[str, str]:
    """What a run's numbers may hang on."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate", "lightning-rl")
    found = {name: installed_version(name) for name in packages}
    return found | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cuda" if on_gpu else "cpu",
    }


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does. Signals reach only the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    had = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, had)
