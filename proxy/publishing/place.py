"""Where versions go live: the engines in rotation, what is live, and the proxies in front of them.

Owns the words in which publishing speaks of engines (`Engine`, `Handle`) and of all proxies (`Fleet`), and
the faults of a swap. How one goes is in swap.py; several proxies on one log are in fleet.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from ...engine.client import EngineGoneError, EngineModel
from ...errors import EngineError, PublishError, StoreError
from ...records import PolicyVersion
from ..live.engines import Engines, EngineState, Holding
from ..live.policies import LivePolicies
from ..live.served import BASE_VERSION
from .prober import Scores

BASE_LABEL = "default"  # vLLM's own, after a start

logger = logging.getLogger("lightning.publisher")

T = TypeVar("T")


class Engine(Scores, Protocol):
    """The slice of the engine that publishing needs."""

    async def models(self) -> list[EngineModel]: ...
    async def base_model(self) -> EngineModel: ...
    async def load_lora(self, name: str, path: str) -> None: ...
    async def unload_lora(self, name: str) -> None: ...
    async def reload_weights(self, path: str) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def weight_label(self) -> str | None: ...
    async def set_weight_label(self, label: str) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def wake(self) -> None: ...
    async def is_asleep(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """One engine: how it is asked, and its place in the rotation."""

    client: Engine
    state: EngineState


class Fleet(Protocol):
    """All proxies in front of the engines; this one alone where there is no other."""

    async def hold(self, *, drains: bool, timeout_sec: float) -> None:
        """Nobody admits a call any more; with `drains`, the running ones have ended too. Or BusyError."""

    async def release(self) -> None:
        """Tell all what is live now, and let calls in."""

    async def announce(self) -> None:
        """Tell all what is live now; no call waits for it."""

    async def prepare(self, *, is_changing: bool) -> None:
        """A change is near, or over: how often the others look."""

    def require_lease(self) -> None:
        """Raises LeaseLostError where another proxy may publish by now."""

    def require_lease_in(self, conn: sa.Connection) -> None:
        """The same for sure, by the row, for what is written in this transaction."""

    @property
    def is_told(self) -> bool:
        """Whether all have heard the last of it."""

    def is_answering(self, policy: str, version: int) -> bool:
        """Whether a call in flight, of any proxy, is served by this version."""

    def is_in_use(self, policy: str, version: int) -> bool:
        """Whether a call in flight or an episode's pin, of any proxy, still needs this version."""


class LeaseLostError(StoreError):
    """Another proxy publishes now."""


class BusyError(PublishError):
    """Calls did not end in time. Nothing is wrong with the version: it is taken up again."""


class RejectedError(PublishError):
    """The probe said no; `verdict` has its numbers."""

    def __init__(self, reason: str, verdict: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.verdict = verdict


def verdict_of(error: EngineError) -> dict[str, Any]:
    numbers = dict(error.verdict) if isinstance(error, RejectedError) else {"result": "rejected"}
    return {**numbers, "reason": str(error)}


def label_of(version: PolicyVersion | None) -> str:
    """The note that a reload leaves in the engine: tells a proxy that starts what the engine holds."""
    if version is None or version.version == BASE_VERSION:
        return BASE_LABEL
    return f"{version.policy}/{version.version} {version.checksum}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where versions go live: the engines in rotation, what is live, and the proxies in front."""

    handles: Sequence[Handle]
    engines: Engines
    live: LivePolicies
    fleet: Fleet
    hold_timeout_sec: float

    async def on_each(self, step: Callable[[Handle], Awaitable[T]]) -> dict[Handle, T]:
        """Do it on all engines in rotation at once; who goes away meanwhile is out of it.

        Raises the first fault, EngineGoneError when none is left.
        """
        handles = [handle for handle in self.handles if handle.state in self.engines.in_rotation]
        if not handles:
            raise EngineGoneError("no engine is left in rotation")
        results = await asyncio.gather(*(step(handle) for handle in handles), return_exceptions=True)
        done: dict[Handle, T] = {}
        gone: BaseException | None = None
        fault: BaseException | None = None
        for handle, result in zip(handles, results, strict=True):
            if isinstance(result, EngineGoneError):
                logger.warning("%s; it is out of rotation until it is back", result)
                self.engines.withdraw(handle.state, is_up=False)
                gone = result
            elif isinstance(result, BaseException):
                fault = fault or result
            else:
                done[handle] = result
        if fault is not None:
            raise fault
        if not done:
            assert gone is not None, "every engine has answered, failed or gone"
            raise gone
        return done


async def what_is_missing(client: Engine, holding: Holding, lacks: Collection[str]) -> str | None:
    """Whether an engine still holds what it must; in words, what it does not."""
    roots = {model.name: model.root for model in await client.models()}
    for name, path in holding.adapters.items():
        if name not in lacks and roots.get(name) != path:
            return f"it has no adapter {name} (any more)"
    label = await client.weight_label()
    if label is not None and label != holding.label:
        return f"it holds {label!r}, not {holding.label!r}"
    return None
