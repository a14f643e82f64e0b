"""The two ways in which a version gets into the engines: a new adapter, or new weights under a closed gate.

Owns the order of the steps, on all engines or none, and what is undone when one fails. An engine that goes
away meanwhile is taken out of rotation, and the others go on. Which version, and what the log says of it, is
the publisher's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...engine.client import EngineGoneError, EngineRefusedError
from ...errors import EngineError, PublishError
from ...records import PolicyVersion
from ..live.engines import Holding
from ..live.served import adapter_name
from .place import Engine, Handle, LeaseLostError, Place, RejectedError, label_of, what_is_missing
from .prober import Before, Prober

RESET_TRIES = 40
RESET_PAUSE_SEC = 0.05

logger = logging.getLogger("lightning.publisher")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the publisher does at a step. `on_proven` is given the engine's name of the version, what engines
    hold with it, and the probe's verdict; it adds to that, or raises RejectedError."""

    on_probing: Callable[[], Awaitable[None]]
    on_accepted: Callable[[Mapping[str, Any]], Awaitable[None]]
    canary_share: float | None = None
    """Of the episodes that begin; None: it is live at once."""
    on_proven: Callable[[str, Holding, Mapping[str, Any]], Awaitable[Mapping[str, Any]]] | None = None

    async def proven(self, model: str, holds: Holding, verdict: Mapping[str, Any]) -> Mapping[str, Any]:
        return verdict if self.on_proven is None else await self.on_proven(model, holds, verdict)


def known_gap(version: PolicyVersion | None) -> float | None:
    """How far engine and trainer were apart on this version, if that was seen."""
    value = (version.verdict or {}).get("gap_rms") if version is not None else None
    return float(value) if isinstance(value, int | float) else None


async def _unless_restarted(handle: Handle, holds: Holding, step: Awaitable[T]) -> T:
    """A verdict about an engine that has lost what was loaded is none: that engine is gone, as it was."""
    try:
        return await step
    except (RejectedError, EngineRefusedError):
        missing = await what_is_missing(handle.client, holds, handle.state.lacks)
        if missing is None:
            raise
        raise EngineGoneError(f"the engine at {handle.state.url} was restarted: {missing}") from None


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
    holds = place.engines.holding.with_adapter(name, path)

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
        return await _unless_restarted(handle, holds, probe(handle))

    was_loaded = version.version in live.loaded_versions(version.policy)  # episodes are pinned to it
    looked = await place.on_each(look)
    is_held = False
    try:
        loaded = await place.on_each(load)
        await hooks.on_probing()
        verdict = await hooks.proven(name, holds, _verdict(await place.on_each(probe_or_gone)))
        await place.fleet.hold(drains=False, timeout_sec=place.hold_timeout_sec)
        is_held = True
        await hooks.on_accepted(verdict)
    except BaseException:
        if not was_loaded:  # else it is unloaded once nothing is answered by it (drained.py)
            for handle in looked:
                await quietly(handle.client.unload_lora(name))
        if is_held:
            await place.fleet.release()
        raise
    if hooks.canary_share is not None:
        live.set_canary(version.policy, version.version, name, hooks.canary_share)
    else:
        live.set_live(version.policy, version.version, version.kind, name)
    place.engines.holding = holds
    await place.fleet.release()


async def back_to_base(place: Place, version: PolicyVersion, previous: PolicyVersion, hooks: Hooks) -> None:
    """From an adapter to the base model, which every engine serves beside it: prove that on each, flip.

    The adapter stays loaded for the episodes that began with it, as after any flip.
    """

    async def probe(handle: Handle) -> dict[str, Any]:
        base = await handle.client.base_model()
        gap = known_gap(previous)
        prober = Prober(handle.client, version, max_model_tokens=base.max_model_tokens, known_gap_rms=gap)
        before = await prober.before(adapter_name(previous.policy, previous.version), primes=False)
        probed = await prober.after(base.name, before)
        if not probed.is_accepted:
            raise RejectedError(probed.reason, probed.numbers())
        return probed.numbers()

    async def probe_or_gone(handle: Handle) -> dict[str, Any]:
        return await _unless_restarted(handle, place.engines.holding, probe(handle))

    base_model = place.live.base_model
    assert base_model is not None, "an engine is in rotation"
    verdict = _verdict(await place.on_each(probe_or_gone))
    await place.fleet.hold(drains=False, timeout_sec=place.hold_timeout_sec)
    try:
        await hooks.on_accepted(verdict)
    except BaseException:
        await place.fleet.release()
        raise
    place.live.set_live(version.policy, version.version, version.kind, base_model)
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

    A version without a folder is the base model. On failure the old weights come back. Calls go on whatever
    happens. An engine whose old weights can't be restored is out of rotation until the publisher has set it
    up again; if that is every engine, policies are refused.
    """
    live = place.live

    async def look(handle: Handle) -> tuple[Prober, Before, str]:
        base = await handle.client.base_model()
        gap = known_gap(previous)
        prober = Prober(handle.client, version, max_model_tokens=base.max_model_tokens, known_gap_rms=gap)
        return prober, await prober.before(base.name, primes=True), base.root

    async def load(handle: Handle) -> int:
        started = time.monotonic()
        base_root = looked[handle][2]
        await load_weights(handle.client, version.path or base_root, label_of(version))
        return _ms_since(started)

    async def probe(handle: Handle) -> dict[str, Any]:
        prober, before, _ = looked[handle]
        probed = await prober.after(before.model, before)
        verdict = {**probed.numbers(), "load_ms": loaded[handle]}
        if not probed.is_accepted:
            raise RejectedError(probed.reason, verdict)
        return verdict

    async def probe_or_gone(handle: Handle) -> dict[str, Any]:
        return await _unless_restarted(handle, holds, probe(handle))

    holds = Holding(label_of(version))
    looked = await place.on_each(look)
    await place.fleet.hold(drains=True, timeout_sec=place.hold_timeout_sec)
    held_since = time.monotonic()
    try:
        loaded = await place.on_each(load)
        await hooks.on_probing()
        base_name = next(iter(looked.values()))[1].model
        proven = _verdict(await place.on_each(probe_or_gone))
        verdict = dict(await hooks.proven(base_name, holds, proven))
        verdict["held_ms"] = _ms_since(held_since)
        await hooks.on_accepted(verdict)
    except LeaseLostError:
        raise  # another proxy decides by now what the engines hold, and when calls go on
    except Exception:  # whatever went wrong: the old weights must be back before calls go on
        await _restore(place, previous, {handle: root for handle, (_, _, root) in looked.items()})
        await place.fleet.release()
        raise
    live.set_live(version.policy, version.version, version.kind, base_name)
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
