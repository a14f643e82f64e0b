"""Whether the proxy can serve, and who is told: a start that takes a while, and a log that does not answer.

Owns the words of the health check. Knows nothing of why an engine is not there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from .live.engines import Engines
from .live.policies import LivePolicies
from .recorder import FULL, STALLED

LOOK_SEC = 0.05
SAY_AFTER_SEC = 5.0
NO_ENGINE = "no engine serves yet: none is reachable, or the log that says what is live does not answer"

logger = logging.getLogger("lightning.proxy")


class LogHealth(Protocol):
    """The slice of recorder.Recorder that is looked at."""

    @property
    def fault(self) -> str | None: ...

    @property
    def refusal(self) -> str | None: ...


class Proxy(Protocol):
    """The slice of app.ProxyApp that is looked at."""

    @property
    def recorder(self) -> LogHealth: ...

    @property
    def live(self) -> LivePolicies: ...

    @property
    def engines(self) -> Engines: ...


def engine_fault(live: LivePolicies, engines: Engines) -> str | None:
    """Why no call can be answered; None while it can."""
    return None if live.base_model is not None and engines.in_rotation else NO_ENGINE


async def when_ready(proxy: Proxy, say: Callable[[], None], *, look_sec: float = LOOK_SEC) -> None:
    """`say`, once calls are served at once: the health check is content and nothing holds them."""
    waited_sec, is_told = 0.0, False
    while True:
        reason = proxy.recorder.refusal or engine_fault(proxy.live, proxy.engines)
        if reason is None and proxy.live.gate.is_open:
            say()
            return
        if waited_sec >= SAY_AFTER_SEC and not is_told:
            is_told = True
            logger.warning("not ready yet, calls wait: %s", reason or "what is live is being set up")
        await asyncio.sleep(look_sec)
        waited_sec += look_sec


async def tell_stalls(proxy: Proxy, *, look_sec: float = 0.5) -> None:
    """Say once when the log stops answering, and once when it goes on. Refusals the recorder tells itself."""
    was_stalled = False
    while True:
        fault = proxy.recorder.fault
        is_stalled = fault in (STALLED, FULL)
        if is_stalled and not was_stalled:
            calls = "served, and recorded later" if proxy.recorder.refusal is None else "refused"
            logger.warning("the log can't be written: %s; calls are %s meanwhile", fault, calls)
        elif was_stalled and fault is None:
            logger.warning("the log answers again")
        was_stalled = is_stalled or (was_stalled and fault is not None)
        await asyncio.sleep(look_sec)
