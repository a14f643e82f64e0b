"""Waiting for what another thread, task or process does: never for ever, and never by the clock alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_SEC = 60.0
"""A loaded machine is slow; who waits this long has met a fault."""


def wait_until(holds: Callable[[], object], timeout_sec: float = WAIT_SEC) -> None:
    deadline = time.monotonic() + timeout_sec
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


async def until(holds: Callable[[], object], timeout_sec: float = WAIT_SEC) -> None:
    """The same on an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + timeout_sec
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)
