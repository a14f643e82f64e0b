"""The one owner of what is live: takes candidates from the database through load, probe, live, drain,
retired.

Driven by rows: the trainer and people only write them. Owns the order of versions, what happens when the
engine goes away or comes back, and every status after `candidate`. How weights are swapped is in swap.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sqlalchemy as sa

from ...engine.client import EngineGoneError
from ...errors import EngineError, LightningError, PublishError, StoreError
from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...settings import ProxySettings
from ...store.database import Database
from ...store.policies import live_version, set_version_status, versions_with_status
from ..live.policies import adapter_name
from .arrival import (
    Arrived,
    CantHoldError,
    Seen,
    Target,
    bring,
    check_version_files,
    look,
    rows_by_kind,
)
from .place import BusyError, Handle, Place, RejectedError
from .swap import Hooks, add_adapter, replace_weights

SOURCE = "publisher"
ENGINE_LOOK_SEC = 1.0
JOIN_AGAIN_SEC = 30.0  # after an engine could not be set up while others serve
MAX_TRIES = 2  # at a version during which the engine went away
MAX_DRAINING = 2  # older ones are unloaded although episodes are pinned to them

_WAITING = (VersionStatus.CANDIDATE, VersionStatus.LOADING, VersionStatus.PROBING)

logger = logging.getLogger("lightning.publisher")

T = TypeVar("T")


class Publisher:
    """One per log. `turn` never raises what can be waited out; `step` is the same for tests."""

    def __init__(
        self,
        database: Database,
        place: Place,
        settings: ProxySettings,
        *,
        on_engine_seen: Seen | None = None,
    ) -> None:
        self._database = database
        self._place = place
        self._engines = place.engines
        self._live = place.live
        self._fleet = place.fleet
        self._settings = settings
        self._on_engine_seen = on_engine_seen or _nothing_to_write
        self._looked_at_sec = float("-inf")
        self._again_at_sec: dict[Handle, float] = {}  # engines that could not be set up
        self._said: set[str] = set()
        self._said_of_engines: set[str] = set()  # at the last look at them
        self._kept_out: dict[Handle, str] = {}  # why an engine could not be set up
        self._tries: Counter[tuple[str, int]] = Counter()

    async def take_over(self, *, was_open: bool) -> None:
        """This proxy publishes from now on. What another has left half done is set up anew, by the log."""
        rows = await self._read(lambda conn: versions_with_status(conn, VersionStatus.LIVE))
        target = rows_by_kind(rows, self._settings.policy)
        adapters = target.holding().adapters
        is_as_logged = (
            all(self._live.live_version(row.policy) == row.version for row in target.adapters)
            and all(self._engines.holding.adapters.get(name) == path for name, path in adapters.items())
            and self._engines.holding.label == target.holding().label
        )
        if not (was_open and is_as_logged):
            self._live.forget_engine()

    async def turn(self) -> None:
        """`step`, whatever it raises."""
        try:
            await self.step()
        except Exception:  # the boundary of the task: one bad version must not end all publishing
            logger.exception("publishing failed; going on")

    async def step(self) -> None:
        """Look at the engines, set up those that are new, take candidates, unload what has drained."""
        self._heard: set[str] = set()
        try:
            try:
                await self._look_at_engines()
            finally:
                await self._fleet.release()  # closed at start or by a set-up; a swap releases its own
            for version in await self._read(lambda conn: versions_with_status(conn, *_WAITING)):
                await self._publish(version)
            await self._unload_drained()
        except LightningError as error:
            self._say(str(error))
        self._said = self._heard

    # --- engines come and go ---

    async def _look_at_engines(self) -> None:
        serves = self._live.base_model is not None and bool(self._engines.in_rotation)
        now = time.monotonic()
        hurries = not serves or any(engine.is_suspect for engine in self._engines.all)
        if not hurries and now - self._looked_at_sec < ENGINE_LOOK_SEC:
            self._heard |= self._said_of_engines  # not looked at, so nothing has changed
            return
        self._looked_at_sec = now
        before = set(self._heard)
        try:
            await self._look()
        finally:
            self._said_of_engines = self._heard - before

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
            self._say(str(error))
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
            await self._set_status(fault.row, VersionStatus.REJECTED, _verdict_of(fault.error))
        base = arrived[0].base.name
        for one in arrived:
            self._admit_if_same(one, base)
        for error in errors:
            self._say(str(error))
        held = [row for row in target.older if any(_name(row) not in one.lacks for one in arrived)]
        target = replace(target, older=tuple(held))
        self._engines.holding = target.holding()
        self._live.set_base_model(base)
        for row in target.older:
            self._live.set_live(row.policy, row.version, row.kind, _name(row))
        for row in (*((target.full,) if target.full else ()), *target.adapters):
            model = base if row.kind is WeightsKind.FULL else _name(row)
            self._live.set_live(row.policy, row.version, row.kind, model)
            logger.info("version %d of %r is live (%s)", row.version, row.policy, row.kind.value)

    async def _target(self, needs: Callable[[str, int], bool]) -> Target:
        """What is live in the log, and those of the older adapters that are still needed."""
        rows = await self._read(
            lambda conn: versions_with_status(conn, VersionStatus.LIVE, VersionStatus.DRAINING)
        )
        live = [row for row in rows if row.status is VersionStatus.LIVE]
        policies = {row.policy for row in live}
        older = tuple(
            row
            for row in rows
            if row.status is VersionStatus.DRAINING
            and row.kind is WeightsKind.LORA
            and row.policy in policies
            and needs(row.policy, row.version)
        )
        return replace(rows_by_kind(live, self._settings.policy), older=older)

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
            self._say(self._kept_out[handle])
            return
        loaded = self._engines.holding.adapters
        target = await self._target(lambda policy, version: adapter_name(policy, version) in loaded)
        arrived, errors = await self._bring([handle], target)
        if errors:
            self._kept_out[handle] = f"the engine at {handle.state.url} stays out of rotation: {errors[0]}"
            self._say(self._kept_out[handle])
            if not isinstance(errors[0], EngineGoneError):
                self._again_at_sec[handle] = time.monotonic() + JOIN_AGAIN_SEC
            return
        assert self._live.base_model is not None, "others serve"
        if self._admit_if_same(arrived[0], self._live.base_model):
            await self._fleet.announce()

    def _admit_if_same(self, arrived: Arrived, base: str) -> bool:
        state = arrived.handle.state
        if arrived.base.name != base:
            self._say(
                f"the engine at {state.url} serves {arrived.base.name!r}, not {base!r} as the others: "
                "give it the same model and --served-model-name"
            )
            return False
        self._engines.admit_engine(state, fingerprint_id=arrived.fingerprint_id, lacks=arrived.lacks)
        logger.info("the engine at %s is in rotation", state.url)
        return True

    # --- candidates ---

    async def _publish(self, version: PolicyVersion) -> None:
        what = f"version {version.version} of {version.policy!r}"
        logger.info("%s: loading from %s", what, version.path)
        try:
            await self._set_status(version, VersionStatus.LOADING)
            await self._fleet.prepare(is_changing=True)
            try:
                await self._load(version)
            finally:
                await self._fleet.prepare(is_changing=False)
        except EngineGoneError as error:
            # Perhaps a restart at a bad moment: it is taken up again, but not for ever.
            self._tries[version.policy, version.version] += 1
            if self._tries[version.policy, version.version] >= MAX_TRIES:
                await self._reject(version, what, f"the engine went away {MAX_TRIES} times: {error}", {})
            raise
        except BusyError as error:
            await self._set_status(version, VersionStatus.CANDIDATE)
            self._say(f"{what} waits: {error}")
        except StoreError:
            raise
        except EngineError as error:
            await self._reject(version, what, str(error), _verdict_of(error))
        else:
            logger.info("%s: live", what)

    async def _load(self, version: PolicyVersion) -> None:
        if version.path is None:
            raise PublishError("it names no folder")
        if version.kind is WeightsKind.FULL and not self._is_ours(version):
            raise PublishError(
                f"full weights would replace {self._settings.policy!r} under the engine's base name; "
                "train a LoRA for a second policy"
            )
        first = next(h for h in self._place.handles if h.state in self._engines.in_rotation)
        await check_version_files(version, await first.client.base_model())
        previous = await self._read(lambda conn: live_version(conn, version.policy))

        async def accepted(verdict: Mapping[str, Any]) -> None:
            await self._set_status(version, VersionStatus.LIVE, verdict)

        hooks = Hooks(lambda: self._set_status(version, VersionStatus.PROBING), accepted)
        swap = add_adapter if version.kind is WeightsKind.LORA else replace_weights
        await swap(self._place, version, previous, hooks)

    async def _reject(
        self, version: PolicyVersion, what: str, reason: str, verdict: Mapping[str, Any]
    ) -> None:
        logger.warning("%s: rejected, the old version keeps serving: %s", what, reason)
        await self._set_status(
            version, VersionStatus.REJECTED, {"result": "rejected", **verdict, "reason": reason}
        )

    # --- versions that were live ---

    async def _unload_drained(self) -> None:
        draining = await self._read(lambda conn: versions_with_status(conn, VersionStatus.DRAINING))
        by_policy: dict[str, list[PolicyVersion]] = {}
        for row in draining:
            by_policy.setdefault(row.policy, []).append(row)
        for rows in by_policy.values():
            for newer, row in enumerate(reversed(rows)):
                await self._retire_if_free(row, is_surplus=newer >= MAX_DRAINING)

    async def _retire_if_free(self, row: PolicyVersion, *, is_surplus: bool) -> None:
        if row.kind is WeightsKind.LORA:
            name = adapter_name(row.policy, row.version)
            if row.version in self._live.loaded_versions(row.policy):
                answering = self._fleet.is_answering(row.policy, row.version)
                if answering or (self._fleet.is_in_use(row.policy, row.version) and not is_surplus):
                    return
                self._live.drop(row.policy, row.version)
                self._engines.holding = self._engines.holding.without_adapter(name)
                await self._fleet.announce()
            if not self._fleet.is_told or self._fleet.is_answering(row.policy, row.version):
                return  # another proxy may still send a call there; the next step looks again
            # Also one that an earlier proxy had loaded: the trainer may delete its folder from now on.
            await self._place.on_each(lambda handle: handle.client.unload_lora(name))
        await self._set_status(row, VersionStatus.RETIRED)

    # --- the log ---

    def _is_ours(self, version: PolicyVersion) -> bool:
        return version.policy == self._settings.policy

    async def _set_status(
        self, version: PolicyVersion, status: VersionStatus, verdict: Mapping[str, Any] | None = None
    ) -> None:
        def write() -> None:
            with self._database.write() as conn:
                self._fleet.require_lease_in(conn)
                set_version_status(
                    conn, version.policy, version.version, status, verdict=verdict, source=SOURCE
                )

        await asyncio.to_thread(write)

    async def _read(self, read: Callable[[sa.Connection], T]) -> T:
        def inside() -> T:
            with self._database.read() as conn:
                return read(conn)

        return await asyncio.to_thread(inside)

    def _say(self, line: str) -> None:
        """Once per run of the same trouble, not four times a second."""
        self._heard.add(line)
        if line not in self._said:
            logger.warning("%s", line)


def _name(row: PolicyVersion) -> str:
    return adapter_name(row.policy, row.version)


async def _nothing_to_write(_: Handle) -> None:
    return None


def _verdict_of(error: EngineError) -> dict[str, Any]:
    numbers = dict(error.verdict) if isinstance(error, RejectedError) else {"result": "rejected"}
    return {**numbers, "reason": str(error)}
