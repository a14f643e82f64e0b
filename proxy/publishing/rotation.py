"""Engines come and go: which are in rotation, and what each is brought to before it gets a call.

Owns the looks at the engines and the set-up of those that are new or were away. How one is set up is in
arrival.py; which version is next is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...engine.client import EngineGoneError
from ...errors import EngineError
from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...store.policies import WAITING, policy_names, versions_with_status
from ..live.served import BASE_VERSION, adapter_name
from .arrival import Arrived, CantHoldError, Seen, Target, bring, look, rows_by_kind
from .canary import Plan
from .place import Handle, Place, verdict_of
from .version_log import Notices, VersionLog

ENGINE_LOOK_SEC = 1.0
JOIN_AGAIN_SEC = 30.0  # after an engine could not be set up while others serve

logger = logging.getLogger("lightning.publisher")


class Rotation:
    """The engines of one place. `policy`: the proxy's own, whose full weights live under the base name."""

    def __init__(self, place: Place, log: VersionLog, notices: Notices, *, policy: str, seen: Seen) -> None:
        self._place = place
        self._engines = place.engines
        self._live = place.live
        self._fleet = place.fleet
        self._log = log
        self._notices = notices
        self._policy = policy
        self._on_engine_seen = seen
        self._looked_at_sec = float("-inf")
        self._again_at_sec: dict[Handle, float] = {}  # engines that could not be set up
        self._kept_out: dict[Handle, str] = {}  # why an engine could not be set up
        self._said_of_engines: frozenset[str] = frozenset()  # at the last look at them

    def hurry(self) -> None:
        """Look at every engine at the next turn, also at those that were kept out a moment ago."""
        self._looked_at_sec = float("-inf")
        self._again_at_sec.clear()

    async def look(self) -> None:
        serves = self._live.base_model is not None and bool(self._engines.in_rotation)
        now = time.monotonic()
        hurries = not serves or any(engine.is_suspect for engine in self._engines.all)
        if not hurries and now - self._looked_at_sec < ENGINE_LOOK_SEC:
            self._notices.repeat(self._said_of_engines)  # not looked at, so nothing has changed
            return
        self._looked_at_sec = now
        before = self._notices.heard
        try:
            await self._look()
        finally:
            self._said_of_engines = self._notices.heard - before

    async def _look(self) -> None:
        reachable = await self._reachable()
        if self._live.base_model is None or not self._engines.in_rotation:
            await self._set_up(reachable)
            return
        for handle in reachable:
            if handle.state not in self._engines.in_rotation:
                await self._let_join(handle)

    async def _reachable(self) -> list[Handle]:
        """The engines that answer; those that went away, or lost what they held, are out of rotation."""

        async def look_at(handle: Handle) -> str | None:
            is_in = handle.state in in_rotation
            return await look(handle, self._engines.holding if is_in else None)

        in_rotation = self._engines.in_rotation
        handles = self._place.handles
        results = await asyncio.gather(*(look_at(handle) for handle in handles), return_exceptions=True)
        found: list[Handle] = []
        errors: list[EngineError] = []
        for handle, result in zip(handles, results, strict=True):
            if isinstance(result, EngineError):
                errors.append(result)
                if isinstance(result, EngineGoneError):
                    self._engines.withdraw(handle.state, is_up=False)
            elif isinstance(result, BaseException):
                raise result
            else:
                if result is not None and handle.state in self._engines.in_rotation:
                    logger.warning("the engine at %s: %s; it is set up anew", handle.state.url, result)
                    self._engines.withdraw(handle.state, is_up=True)
                handle.state.is_suspect = False
                found.append(handle)
        if not found:
            if not self._engines.in_rotation:
                self._live.forget_engine()
            raise errors[0]
        for error in errors:
            self._notices.say(str(error))
        return found

    async def _set_up(self, handles: Sequence[Handle]) -> None:
        """No engine serves: bring all that are there to what the log says is live, while calls wait."""
        await self._fleet.hold(drains=True, timeout_sec=self._place.hold_timeout_sec)
        self._live.forget_engine()
        while True:
            target = await self._target(self._fleet.is_in_use)
            arrived, errors = await self._bring(handles, target)
            if arrived:
                break
            fault = next((error for error in errors if isinstance(error, CantHoldError)), None)
            if fault is None:
                raise errors[0]
            logger.error("%s; the base model, or what else is live, serves instead", fault)
            await self._log.set_status(fault.row, VersionStatus.REJECTED, verdict_of(fault.error))
        base = arrived[0].base.name
        for one in arrived:
            self._admit_if_same(one, base)
        for error in errors:
            self._notices.say(str(error))
        held = [row for row in target.older if any(_name(row) not in one.lacks for one in arrived)]
        target = replace(target, older=tuple(held))
        self._engines.holding = target.holding()
        self._live.declare(await self._log.read(policy_names))
        self._live.set_base_model(base)
        for row in target.older:
            self._live.set_live(row.policy, row.version, row.kind, _name(row))
        for policy in {row.policy for row in target.older}:
            self._live.set_live(
                policy, BASE_VERSION, WeightsKind.LORA, base
            )  # until one of its own is, below
        for row in (*((target.full,) if target.full else ()), *target.adapters):
            model = base if row.kind is WeightsKind.FULL else _name(row)
            self._live.set_live(row.policy, row.version, row.kind, model)
            logger.info("version %d of %r is live (%s)", row.version, row.policy, row.kind.value)
        for row in target.canaries:
            plan = Plan.in_verdict(row.verdict)
            if plan is not None and self._live.live_version(row.policy) is not None:
                self._live.set_canary(row.policy, row.version, _name(row), plan.share)

    async def _target(self, needs: Callable[[str, int], bool]) -> Target:
        """What is live in the log, and those of the older adapters that are still needed."""
        # One that a person has asked for is a candidate again; its episodes are pinned to it all the same.
        held = (VersionStatus.LIVE, VersionStatus.DRAINING, *WAITING)
        rows = await self._log.read(lambda conn: versions_with_status(conn, *held))
        serving = [row for row in rows if row.status in (VersionStatus.LIVE, VersionStatus.CANARY)]
        older = tuple(
            row
            for row in rows
            if row not in serving
            and row.live_at_ms is not None
            and row.kind is WeightsKind.LORA
            and needs(row.policy, row.version)
        )
        return replace(rows_by_kind(serving, self._policy), older=older)

    async def _bring(
        self, handles: Sequence[Handle], target: Target
    ) -> tuple[list[Arrived], list[EngineError]]:
        steps = (bring(handle, target, self._on_engine_seen) for handle in handles)
        results = await asyncio.gather(*steps, return_exceptions=True)
        arrived: list[Arrived] = []
        errors: list[EngineError] = []
        for result in results:
            if isinstance(result, Arrived):
                arrived.append(result)
            elif isinstance(result, EngineError):
                errors.append(result)
            else:
                raise result
        return arrived, errors

    async def _let_join(self, handle: Handle) -> None:
        """Others serve: this one gets what is live before it gets a call."""
        if time.monotonic() < self._again_at_sec.get(handle, 0):
            self._notices.say(self._kept_out[handle])
            return
        loaded = self._engines.holding.adapters
        target = await self._target(lambda policy, version: adapter_name(policy, version) in loaded)
        arrived, errors = await self._bring([handle], target)
        if errors:
            self._kept_out[handle] = f"the engine at {handle.state.url} stays out of rotation: {errors[0]}"
            self._notices.say(self._kept_out[handle])
            if not isinstance(errors[0], EngineGoneError):
                self._again_at_sec[handle] = time.monotonic() + JOIN_AGAIN_SEC
            return
        assert self._live.base_model is not None, "others serve"
        if self._admit_if_same(arrived[0], self._live.base_model):
            await self._fleet.announce()

    def _admit_if_same(self, arrived: Arrived, base: str) -> bool:
        state = arrived.handle.state
        if arrived.base.name != base:
            self._notices.say(
                f"the engine at {state.url} serves {arrived.base.name!r}, not {base!r} as the others: "
                "give it the same model and --served-model-name"
            )
            return False
        self._engines.admit_engine(state, fingerprint_id=arrived.fingerprint_id, lacks=arrived.lacks)
        logger.info("the engine at %s is in rotation", state.url)
        return True


def _name(row: PolicyVersion) -> str:
    return adapter_name(row.policy, row.version)
