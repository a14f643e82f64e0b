"""The two ways in which a version gets into the engines: a new adapter, or new weights under a closed gate.

Owns the order of the steps, on all engines or none, and what is undone when one fails. An engine that goes
away meanwhile is taken out of rotation, and the others go on. Which version, and what the log says of it, is
the publisher's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from ..engine.client import EngineGoneError, EngineModel, EngineRefusedError
from ..errors import EngineError, PublishError, StoreError
from ..records import PolicyVersion
from .engines import Engines, EngineState, Holding
from .policies import LivePolicies, adapter_name
from .prober import Before, Prober, Scores

BASE_LABEL = "default"  # vLLM's own, after a start
RESET_TRIES = 40
RESET_PAUSE_SEC = 0.05

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

    def require_lease_in(self, conn: sa.Connection) -> None:
        """Raises LeaseLostError where another proxy publishes by now."""

    @property
    def is_told(self) -> bool:
        """Whether all have heard the last of it."""

    def is_answering(self, policy: str, version: int) -> bool:
        """Whether a call in flight, of any proxy, is served by this version."""

    def is_in_use(self, policy: str, version: int) -> bool:
        """Whether a call in flight or an episode's pin, of any proxy, still needs this version."""


class OwnGate:
    """The fleet of one proxy that shares its log with nobody."""

    def __init__(self, live: LivePolicies) -> None:
        self._live = live

    async def hold(self, *, drains: bool, timeout_sec: float) -> None:
        gate = self._live.gate
        gate.hold()
        if not drains:
            return
        try:
            await gate.drained(timeout_sec)
        except TimeoutError:
            running = gate.in_flight
            gate.open()
            raise BusyError(f"{running} calls were still running after {timeout_sec:g} s") from None

    async def release(self) -> None:
        self._live.gate.open()

    async def announce(self) -> None:
        pass  # who would listen?

    async def prepare(self, *, is_changing: bool) -> None:
        pass

    def require_lease_in(self, conn: sa.Connection) -> None:
        pass

    @property
    def is_told(self) -> bool:
        return True

    def is_answering(self, policy: str, version: int) -> bool:
        return self._live.is_answering(policy, version)

    def is_in_use(self, policy: str, version: int) -> bool:
        return self._live.is_in_use(policy, version)


class LeaseLostError(StoreError):
    """Another proxy publishes now."""


class BusyError(PublishError):
    """Calls did not end in time. Nothing is wrong with the version: it is taken up again."""


class RejectedError(PublishError):
    """The probe said no; `verdict` has its numbers."""

    def __init__(self, reason: str, verdict: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the publisher does at a step: write it into the log."""

    on_probing: Callable[[], Awaitable[None]]
    on_accepted: Callable[[Mapping[str, Any]], Awaitable[None]]


def label_of(version: PolicyVersion | None) -> str:
    """The note that a reload leaves in the engine: tells a proxy that starts what the engine holds."""
    return BASE_LABEL if version is None else f"{version.policy}/{version.version} {version.checksum}"


def known_gap(version: PolicyVersion | None) -> float | None:
    """How far engine and trainer were apart on this version, if that was seen."""
    value = (version.verdict or {}).get("gap_rms") if version is not None else None
    return float(value) if isinstance(value, int | float) else None


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


async def _unless_restarted(handle: Handle, holds: Holding, step: Awaitable[T]) -> T:
    """A verdict about an engine that has lost what was loaded is none: that engine is gone, as it was."""
    try:
        return await step
    except (RejectedError, EngineRefusedError):
        missing = await what_is_missing(handle.client, holds, handle.state.lacks)
        if missing is None:
            raise
        raise EngineGoneError(f"the engine at {handle.state.url} was restarted: {missing}") from None


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


def _verdict(by_engine: Mapping[Handle, Mapping[str, Any]]) -> dict[str, Any]:
    """The first engine's numbers; those of all, where there are several."""
    first = dict(next(iter(by_engine.values())))
    if len(by_engine) > 1:
        first["engines"] = {handle.state.url: dict(numbers) for handle, numbers in by_engine.items()}
    return first


async def add_adapter(
    place: Place, version: PolicyVersion, previous: PolicyVersion | None, hooks: Hooks
) -> None:
    """Load an adapter beside the old one on every engine, prove it on each, flip.

    A failure leaves what was live untouched.
    """
    assert version.path is not None, "an adapter has a folder"
    path, live, name = version.path, place.live, adapter_name(version.policy, version.version)

    async def look(handle: Handle) -> tuple[Prober, Before]:
        base = await handle.client.base_model()
        held = live.loaded_versions(version.policy)
        old_model = held.get(live.live_version(version.policy) or 0, base.name)
        gap = known_gap(previous)
        prober = Prober(handle.client, version, max_model_tokens=base.max_model_tokens, known_gap_rms=gap)
        return prober, await prober.before(old_model, primes=False)  # a new name has a cache of its own

    async def load(handle: Handle) -> int:
        started = time.monotonic()
        await ensure_adapter(handle.client, name, path)
        return _ms_since(started)

    async def probe(handle: Handle) -> dict[str, Any]:
        prober, before = looked[handle]
        probed = await prober.after(name, before)
        verdict = {**probed.numbers(), "load_ms": loaded[handle]}
        if not probed.is_accepted:
            raise RejectedError(probed.reason, verdict)
        return verdict

    async def probe_or_gone(handle: Handle) -> dict[str, Any]:
        return await _unless_restarted(handle, place.engines.holding.with_adapter(name, path), probe(handle))

    looked = await place.on_each(look)
    is_held = False
    try:
        loaded = await place.on_each(load)
        await hooks.on_probing()
        verdict = _verdict(await place.on_each(probe_or_gone))
        await place.fleet.hold(drains=False, timeout_sec=place.hold_timeout_sec)
        is_held = True
        await hooks.on_accepted(verdict)
    except BaseException:
        for handle in looked:
            await quietly(handle.client.unload_lora(name))
        if is_held:
            await place.fleet.release()
        raise
    live.set_live(version.policy, version.version, version.kind, name)
    place.engines.holding = place.engines.holding.with_adapter(name, path)
    await place.fleet.release()


async def ensure_adapter(engine: Engine, name: str, path: str) -> None:
    """Have the adapter loaded from that path, whatever a crash has left behind."""
    held = {model.name: model for model in await engine.models()}.get(name)
    if held is not None and held.root != path:
        await engine.unload_lora(name)
        held = None
    if held is None:
        await engine.load_lora(name, path)
    roots = {model.name: model.root for model in await engine.models()}
    if roots.get(name) != path:
        raise PublishError(f"the engine says that {name} is {roots.get(name)}, not {path}")


async def replace_weights(
    place: Place, version: PolicyVersion, previous: PolicyVersion | None, hooks: Hooks
) -> None:
    """Hold new calls, drain, reload every engine, empty the caches, prove each, release.

    On failure the old weights come back. Calls go on whatever happens. An engine whose old weights can't be
    restored is out of rotation until the publisher has set it up again; if that is every engine, policies
    are refused.
    """
    assert version.path is not None, "full weights have a folder"
    path, live = version.path, place.live

    async def look(handle: Handle) -> tuple[Prober, Before, str]:
        base = await handle.client.base_model()
        gap = known_gap(previous)
        prober = Prober(handle.client, version, max_model_tokens=base.max_model_tokens, known_gap_rms=gap)
        return prober, await prober.before(base.name, primes=True), base.root

    async def load(handle: Handle) -> int:
        started = time.monotonic()
        await load_weights(handle.client, path, label_of(version))
        return _ms_since(started)

    async def probe(handle: Handle) -> dict[str, Any]:
        prober, before, _ = looked[handle]
        probed = await prober.after(before.model, before)
        verdict = {**probed.numbers(), "load_ms": loaded[handle]}
        if not probed.is_accepted:
            raise RejectedError(probed.reason, verdict)
        return verdict

    async def probe_or_gone(handle: Handle) -> dict[str, Any]:
        return await _unless_restarted(handle, Holding(label_of(version)), probe(handle))

    looked = await place.on_each(look)
    await place.fleet.hold(drains=True, timeout_sec=place.hold_timeout_sec)
    held_since = time.monotonic()
    try:
        loaded = await place.on_each(load)
        await hooks.on_probing()
        verdict = _verdict(await place.on_each(probe_or_gone))
        verdict["held_ms"] = _ms_since(held_since)
        await hooks.on_accepted(verdict)
    except LeaseLostError:
        raise  # another proxy decides by now what the engines hold, and when calls go on
    except Exception:  # whatever went wrong: the old weights must be back before calls go on
        await _restore(place, previous, {handle: root for handle, (_, _, root) in looked.items()})
        await place.fleet.release()
        raise
    base_model = next(iter(looked.values()))[1].model
    live.set_live(version.policy, version.version, version.kind, base_model)
    place.engines.holding = place.engines.holding.with_label(label_of(version))
    await place.fleet.release()


async def load_weights(engine: Engine, path: str, label: str) -> None:
    """Reload and empty the prefix cache; the caller holds the gate, or nothing is served yet."""
    # A crash from here on must not leave the label of weights that are no longer there.
    await quietly(engine.set_weight_label(f"loading {label}"))
    try:
        await engine.reload_weights(path)
    except EngineRefusedError as error:
        if error.status == 404:
            raise PublishError(
                "this engine can't reload full weights: start it with VLLM_SERVER_DEV_MODE=1 on loopback "
                "(lightning engine serve does), or train with weights = lora"
            ) from None
        raise
    for _ in range(RESET_TRIES):
        if await engine.reset_prefix_cache():
            break
        await asyncio.sleep(RESET_PAUSE_SEC)  # an answer that has just ended may still hold blocks
    else:
        raise PublishError("the engine could not empty its prefix cache after the reload")
    await quietly(engine.set_weight_label(label))


async def _restore(place: Place, previous: PolicyVersion | None, base_roots: Mapping[Handle, str]) -> None:
    """The old weights, wherever the new ones may be; nothing to do on an engine that has gone."""

    async def back(handle: Handle) -> None:
        path = base_roots[handle] if previous is None or previous.path is None else previous.path
        try:
            await load_weights(handle.client, path, label_of(previous))
        except EngineError as error:
            logger.error("the old weights could not be restored: %s", error)
            place.engines.withdraw(handle.state, is_up=not isinstance(error, EngineGoneError))

    in_rotation = place.engines.in_rotation
    await asyncio.gather(*(back(handle) for handle in base_roots if handle.state in in_rotation))
    if not place.engines.in_rotation:
        place.live.forget_engine()


async def quietly(step: Awaitable[None]) -> None:
    """A step whose failure changes nothing: what follows finds out by itself."""
    try:
        await step
    except EngineError as error:
        logger.debug("%s", error)


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
