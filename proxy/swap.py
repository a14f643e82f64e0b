"""The two ways in which a version gets into the engine: a new adapter, or new weights under a closed gate.

Owns the order of the steps and what is undone when one fails. Which version, and what the log says of it, is
the publisher's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..engine.client import EngineModel, EngineRefusedError
from ..errors import EngineError, PublishError
from ..records import PolicyVersion
from .policies import LivePolicies, adapter_name
from .prober import Before, Prober, Scores

BASE_LABEL = "default"  # vLLM's own, after a start
RESET_TRIES = 40
RESET_PAUSE_SEC = 0.05

logger = logging.getLogger("lightning.publisher")


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


async def add_adapter(
    engine: Engine, live: LivePolicies, version: PolicyVersion, previous: PolicyVersion | None, hooks: Hooks
) -> None:
    """Load an adapter beside the old one, prove it, flip. A failure leaves what was live untouched."""
    assert version.path is not None, "an adapter has a folder"
    base = await engine.base_model()
    old_model = live.loaded_versions(version.policy).get(live.live_version(version.policy) or 0, base.name)
    prober = Prober(
        engine, version, max_model_tokens=base.max_model_tokens, known_gap_rms=known_gap(previous)
    )
    before = await prober.before(old_model, primes=False)  # a new name has a cache of its own
    name = adapter_name(version.policy, version.version)
    started = time.monotonic()
    await ensure_adapter(engine, name, version.path)
    load_ms = _ms_since(started)
    try:
        await hooks.on_probing()
        probed = await prober.after(name, before)
        verdict = {**probed.numbers(), "load_ms": load_ms}
        if not probed.is_accepted:
            raise RejectedError(probed.reason, verdict)
        await hooks.on_accepted(verdict)
    except BaseException:
        await _quietly(engine.unload_lora(name))
        raise
    live.set_live(version.policy, version.version, version.kind, name)


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
    engine: Engine,
    live: LivePolicies,
    version: PolicyVersion,
    previous: PolicyVersion | None,
    hooks: Hooks,
    *,
    drain_timeout_sec: float,
) -> None:
    """Hold new calls, drain, reload, empty the cache, prove, release; on failure the old weights come back.

    The gate is open again whatever happens. When the old weights can't be restored, the engine counts as
    unknown and policies are refused until the publisher has set it up again.
    """
    assert version.path is not None, "full weights have a folder"
    base = await engine.base_model()
    prober = Prober(
        engine, version, max_model_tokens=base.max_model_tokens, known_gap_rms=known_gap(previous)
    )
    before = await prober.before(base.name, primes=True)
    try:
        await live.gate.close(drain_timeout_sec)
    except TimeoutError:
        running = live.gate.in_flight
        raise BusyError(f"{running} calls were still running after {drain_timeout_sec:g} s") from None
    held_since = time.monotonic()
    try:
        try:
            verdict = await _reload_and_probe(engine, prober, before, version, hooks)
            verdict["held_ms"] = _ms_since(held_since)
            await hooks.on_accepted(verdict)
        except Exception:  # whatever went wrong: the old weights must be back before the gate opens
            await _restore(engine, live, previous, base.root)
            raise
        live.set_live(version.policy, version.version, version.kind, base.name)
    finally:
        live.gate.open()


async def _reload_and_probe(
    engine: Engine,
    prober: Prober,
    before: Before,
    version: PolicyVersion,
    hooks: Hooks,
) -> dict[str, Any]:
    assert version.path is not None, "full weights have a folder"
    started = time.monotonic()
    await load_weights(engine, version.path, label_of(version))
    load_ms = _ms_since(started)
    await hooks.on_probing()
    probed = await prober.after(before.model, before)
    verdict = {**probed.numbers(), "load_ms": load_ms}
    if not probed.is_accepted:
        raise RejectedError(probed.reason, verdict)
    return verdict


async def load_weights(engine: Engine, path: str, label: str) -> None:
    """Reload and empty the prefix cache; the caller holds the gate, or nothing is served yet."""
    # A crash from here on must not leave the label of weights that are no longer there.
    await _quietly(engine.set_weight_label(f"loading {label}"))
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
    await _quietly(engine.set_weight_label(label))


async def _restore(
    engine: Engine, live: LivePolicies, previous: PolicyVersion | None, base_root: str
) -> None:
    path = base_root if previous is None or previous.path is None else previous.path
    try:
        await load_weights(engine, path, label_of(previous))
    except EngineError as error:
        logger.error("the old weights could not be restored: %s", error)
        live.forget_engine()


async def _quietly(step: Awaitable[None]) -> None:
    """A step whose failure changes nothing: what follows finds out by itself."""
    try:
        await step
    except EngineError as error:
        logger.debug("%s", error)


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
