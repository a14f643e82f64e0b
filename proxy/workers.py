"""Several proxy processes on one listening socket, and the one that looks after them.

Owns starting, restarting and ending the workers. Each worker is a whole proxy (commands.py); they agree
through the log (fleet.py), not through this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from ..errors import UserError
from ..settings.proxy import ProxySettings

FIRST_WAIT_SEC = 0.5
LAST_WAIT_SEC = 10.0
STEADY_SEC = 10.0
"""A worker that has run for so long did not die of how it starts."""

logger = logging.getLogger("lightning.workers")

Worker = Callable[[ProxySettings, socket.socket, Callable[[], None]], None]
"""Serves until a signal; calls the last argument once it takes calls."""


class _Slot:
    """The place of one worker, whichever process fills it at the moment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: SpawnProcess | None = None
        self.started_at = 0.0
        self.start_at = 0.0
        self.wait_sec = FIRST_WAIT_SEC
        self.is_told = False  # to end

    def tell(self) -> None:
        """Pass a signal on to the process, if it is there to hear it."""
        if self.process is not None and self.process.pid is not None and self.process.is_alive():
            self.is_told = True
            os.kill(self.process.pid, signal.SIGTERM)


class Workers:
    """Runs `num` workers until a signal; call `run` from the main thread."""

    def __init__(self, settings: ProxySettings, listener: socket.socket, serve: Worker) -> None:
        self._settings = settings
        self._listener = listener
        self._serve = serve
        self._context = multiprocessing.get_context("spawn")
        self._slots = [_Slot(number) for number in range(settings.workers)]
        self._ready = self._context.Semaphore(0)
        self._num_signals = 0
        self._wake_read, self._wake_write = os.pipe()

    def run(self, on_ready: Callable[[], None]) -> None:
        """Raises UserError when the workers end before one of them has taken a call."""
        os.set_blocking(self._wake_write, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for slot in self._slots:
            self._start(slot)
        num_ready = 0
        while self._num_signals == 0:
            while num_ready < len(self._slots) and self._ready.acquire(block=False):
                num_ready += 1
                if num_ready == len(self._slots):
                    on_ready()
            if num_ready == 0 and all(slot.process is None for slot in self._slots):
                raise UserError("no worker could be started; its own words are above")
            self._turn(timeout_sec=0.05 if num_ready < len(self._slots) else 1.0)
        self._end()

    def _turn(self, timeout_sec: float) -> None:
        alive = [slot.process.sentinel for slot in self._slots if slot.process is not None]
        wait([*alive, self._wake_read], timeout_sec)
        now = time.monotonic()
        for slot in self._slots:
            process = slot.process
            if process is not None and not process.is_alive():
                slot.process = None
                if now - slot.started_at > STEADY_SEC:
                    slot.wait_sec = FIRST_WAIT_SEC
                slot.start_at = now + slot.wait_sec
                slot.wait_sec = min(2 * slot.wait_sec, LAST_WAIT_SEC)
                logger.error("worker %d ended (%s); it is started again", slot.number, _how(process.exitcode))
            if slot.process is None and self._num_signals == 0 and now >= slot.start_at:
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        slot.started_at = time.monotonic()
        process = self._context.Process(
            target=_work,
            args=(self._serve, self._settings, self._listener, self._ready),
            name=f"lightning-worker-{slot.number}",
        )
        process.start()
        slot.process = process

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """The workers finish their calls and end. A second signal cuts the calls off."""
        self._num_signals += 1
        os.write(self._wake_write, b"!")
        for slot in self._slots:
            slot.tell()

    def _end(self) -> None:
        self._listener.close()  # or clients would wait here for somebody to take their connection
        for slot in self._slots:
            if not slot.is_told:  # the signal came while it was being started
                slot.tell()
        for slot in self._slots:
            if slot.process is not None:
                slot.process.join()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _work(
    serve: Worker, settings: ProxySettings, listener: socket.socket, ready: threading.Semaphore
) -> None:
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the parent, which passes on one signal for each
    threading.Thread(target=_end_with_parent, name="lightning-parent", daemon=True).start()
    serve(settings, listener, ready.release)


def _end_with_parent() -> None:
    """A worker without the process that looks after it would serve for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by a parent"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
