"""The gate in front of the engine: calls pass while it is open, wait while it is closed.

Owns the count of calls that the engine is working on. Knows nothing of policies, models or HTTP. One event
loop only; a waiting call that is cancelled (its client left) leaves no trace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Gate:
    """Hold new calls, let the running ones end, and let the held ones go on.

    Full weights change under every request at once, so the publisher closes the gate around a reload. A
    call that waits here has not reached the engine: it sees the new weights from its first token.

    A fence closes it by itself, at a time that somebody has to put off again and again (`fence_at`): a
    proxy that others may take for gone must not admit a call, however late it notices.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_held = False
        self._fence_at = math.inf
        self._opened = asyncio.Event()
        self._opened.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._in_flight = 0
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """Calls that have entered and not left."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Calls that the closed gate holds."""
        return self._waiting

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and not self.is_fenced

    @property
    def is_held(self) -> bool:
        """Whether somebody has stopped admissions on purpose."""
        return self._is_held

    @property
    def is_fenced(self) -> bool:
        return self._clock() >= self._fence_at

    async def enter(self) -> None:
        """Wait while the gate is closed, then count as in flight. Pair with exactly one `leave`."""
        self._waiting += 1
        try:
            # A waiter wakes up in a later turn of the loop than `open`: the gate may be closed again by then.
            while not self._opened.is_set() or self._clock() >= self._fence_at:
                self._opened.clear()  # where the fence was first seen by this call
                await self._opened.wait()
        finally:
            self._waiting -= 1
        self._in_flight += 1
        self._empty.clear()

    def leave(self) -> None:
        """The engine has ended this call's answer (whether or not the client has read it)."""
        assert self._in_flight > 0, "leave() without enter()"
        self._in_flight -= 1
        if self._in_flight == 0:
            self._empty.set()

    def hold(self) -> None:
        """Stop admissions. Harmless on a closed gate."""
        self._is_held = True
        self._opened.clear()

    def fence_at(self, clock_sec: float) -> None:
        """From then on nobody enters, unless this is called again before (or after) with a later time."""
        self._fence_at = clock_sec
        if not self._is_held and not self.is_fenced:
            self._opened.set()

    async def drained(self, timeout_sec: float | None) -> None:
        """Wait until nothing is in flight, or raise TimeoutError (never, where the limit is None)."""
        async with asyncio.timeout(timeout_sec):
            await self._empty.wait()

    def open(self) -> None:
        """Let the held calls in. Harmless on an open gate."""
        self._is_held = False
        if not self.is_fenced:
            self._opened.set()
