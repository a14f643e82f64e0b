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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from ..engine.client import EngineGoneError, EngineModel
from ..errors import EngineError, LightningError, PublishError, StoreError
from ..records import PolicyVersion, VersionStatus, WeightsKind
from ..settings import ProxySettings
from ..store.database import Database
from ..store.policies import live_version, set_version_status, versions_with_status
from .files import FilesError, check_files
from .policies import LivePolicies, adapter_name
from .prober import Prober
from .swap import (
    BusyError,
    Engine,
    Hooks,
    RejectedError,
    add_adapter,
    ensure_adapter,
    known_gap,
    label_of,
    load_weights,
    replace_weights,
)

if TYPE_CHECKING:
    from .app import ProxyApp

SOURCE = "publisher"
ENGINE_LOOK_SEC = 1.0
DRAIN_TIMEOUT_SEC = 120.0
MAX_TRIES = 2  # at a version during which the engine went away
MAX_DRAINING = 2  # older ones are unloaded although episodes are pinned to them

_WAITING = (VersionStatus.CANDIDATE, VersionStatus.LOADING, VersionStatus.PROBING)

logger = logging.getLogger("lightning.publisher")

T = TypeVar("T")


class Publisher:
    """One per engine. `run` ends only by cancellation; `step` is one turn of it, for tests."""

    def __init__(
        self,
        database: Database,
        engine: Engine,
        live: LivePolicies,
        settings: ProxySettings,
        *,
        on_engine_seen: Callable[[], Awaitable[None]] | None = None,
        drain_timeout_sec: float = DRAIN_TIMEOUT_SEC,
    ) -> None:
        self._database = database
        self._engine = engine
        self._live = live
        self._settings = settings
        self._on_engine_seen = on_engine_seen
        self._drain_timeout_sec = drain_timeout_sec
        self._is_set_up = False
        self._looked_at_sec = float("-inf")
        self._said: str | None = None
        self._tries: Counter[tuple[str, int]] = Counter()

    async def run(self) -> None:
        """Poll for candidates until cancelled; errors of engine and database are waited out."""
        # Before any call gets in: the engine may hold anything, and the log must not name a version for it.
        await self._live.gate.close(0)
        while True:
            try:
                await self.step()
            except Exception:  # the boundary of the task: one bad version must not end all publishing
                logger.exception("publishing failed; going on")
            await asyncio.sleep(self._settings.publish_poll_sec)

    async def step(self) -> None:
        """Look at the engine, set it up if it is new, take candidates, unload what has drained."""
        try:
            try:
                await self._look_at_engine()
            finally:
                self._live.gate.open()  # closed by `run` or by `_set_up`; a swap opens its own
            for version in await self._read(lambda conn: versions_with_status(conn, *_WAITING)):
                await self._publish(version)
            await self._unload_drained()
            self._said = None
        except LightningError as error:
            if isinstance(error, EngineGoneError):
                self._forget_engine()
            self._say(str(error))

    # --- the engine comes and goes ---

    def _forget_engine(self) -> None:
        self._is_set_up = False
        self._live.forget_engine()

    async def _look_at_engine(self) -> None:
        if self._live.base_model is None:
            self._is_set_up = False  # a failed swap has left it unknown
        if self._is_set_up and time.monotonic() - self._looked_at_sec < ENGINE_LOOK_SEC:
            return
        base = await self._engine.base_model()
        self._looked_at_sec = time.monotonic()
        if not self._is_set_up:
            await self._set_up(base)
            self._is_set_up = True

    async def _set_up(self, base: EngineModel) -> None:
        """The engine is there, again or for the first time: bring it to what the log says is live."""
        if self._on_engine_seen is not None:
            await self._on_engine_seen()
        rows = await self._read(lambda conn: versions_with_status(conn, VersionStatus.LIVE))
        full = next((row for row in rows if row.kind is WeightsKind.FULL and self._is_ours(row)), None)
        if self._live.gate.is_open:
            # A restart: calls that wait here get the right weights, instead of a refusal.
            await self._drain()
        try:
            full = await self._set_up_weights(base, full)
            self._live.set_base_model(base.name)
            if full is not None:
                self._live.set_live(full.policy, full.version, full.kind, base.name)
            for row in rows:
                if row.kind is WeightsKind.LORA:
                    await self._set_up_adapter(base, row)
        except BaseException:
            self._live.forget_engine()
            raise

    async def _drain(self) -> None:
        try:
            await self._live.gate.close(self._drain_timeout_sec)
        except TimeoutError:
            running = self._live.gate.in_flight
            raise PublishError(
                f"{running} calls do not end; the engine is not set up before they do"
            ) from None

    async def _set_up_weights(self, base: EngineModel, full: PolicyVersion | None) -> PolicyVersion | None:
        """The version whose weights the base name stands for now; None for the base model itself."""
        label = await self._engine.weight_label()
        if full is None or full.path is None:
            # Without the route nobody can have reloaded anything.
            if label is not None and label != label_of(None):
                await load_weights(self._engine, base.root, label_of(None))
            return None
        try:
            if label != label_of(full) or not await self._is_proven(base.name, base, full):
                await self._check_files(full, base)
                await load_weights(self._engine, full.path, label_of(full))
                await self._prove(base.name, base, full)
        # What the engine can't do (a flag is missing, it is busy) is not the version's fault: wait it out.
        except (RejectedError, FilesError) as error:
            logger.error(
                "version %d of %r can't be brought back, the base model serves instead: %s",
                full.version,
                full.policy,
                error,
            )
            await self._set_status(full, VersionStatus.REJECTED, _verdict_of(error))
            await load_weights(self._engine, base.root, label_of(None))
            return None
        logger.info("version %d of %r is live (full weights)", full.version, full.policy)
        return full

    async def _set_up_adapter(self, base: EngineModel, row: PolicyVersion) -> None:
        assert row.path is not None, "an adapter has a folder"
        name = adapter_name(row.policy, row.version)
        try:
            await ensure_adapter(self._engine, name, row.path)
            await self._prove(name, base, row)
        except (RejectedError, FilesError) as error:
            logger.error("version %d of %r can't be brought back: %s", row.version, row.policy, error)
            await self._set_status(row, VersionStatus.REJECTED, _verdict_of(error))
            return
        self._live.set_live(row.policy, row.version, row.kind, name)
        logger.info("version %d of %r is live (adapter)", row.version, row.policy)

    async def _prove(self, model: str, base: EngineModel, row: PolicyVersion) -> None:
        gap = known_gap(row)
        prober = Prober(self._engine, row, max_model_tokens=base.max_model_tokens, known_gap_rms=gap)
        probed = await prober.after(model, None)
        if not probed.is_accepted:
            raise RejectedError(probed.reason, probed.numbers())

    async def _is_proven(self, model: str, base: EngineModel, row: PolicyVersion) -> bool:
        """A label is only a note: somebody may have reloaded other weights under it."""
        try:
            await self._prove(model, base, row)
        except RejectedError:
            return False
        return True

    # --- candidates ---

    async def _publish(self, version: PolicyVersion) -> None:
        what = f"version {version.version} of {version.policy!r}"
        logger.info("%s: loading from %s", what, version.path)
        try:
            await self._set_status(version, VersionStatus.LOADING)
            await self._load(version)
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
        await self._check_files(version, await self._engine.base_model())
        previous = await self._read(lambda conn: live_version(conn, version.policy))

        async def accepted(verdict: Mapping[str, Any]) -> None:
            await self._set_status(version, VersionStatus.LIVE, verdict)

        hooks = Hooks(lambda: self._set_status(version, VersionStatus.PROBING), accepted)
        if version.kind is WeightsKind.LORA:
            await add_adapter(self._engine, self._live, version, previous, hooks)
        else:
            limit = self._drain_timeout_sec
            await replace_weights(self._engine, self._live, version, previous, hooks, drain_timeout_sec=limit)

    async def _check_files(self, version: PolicyVersion, base: EngineModel) -> None:
        assert version.path is not None, "checked by the caller"
        path = Path(version.path)
        await asyncio.to_thread(check_files, path, version.kind, version.checksum, Path(base.root))

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
            if row.version in self._live.loaded_versions(row.policy):
                answering = self._live.is_answering(row.policy, row.version)
                if answering or (self._live.is_in_use(row.policy, row.version) and not is_surplus):
                    return
                self._live.drop(row.policy, row.version)
            # Also one that an earlier proxy had loaded: the trainer may delete its folder from now on.
            await self._engine.unload_lora(adapter_name(row.policy, row.version))
        await self._set_status(row, VersionStatus.RETIRED)

    # --- the log ---

    def _is_ours(self, version: PolicyVersion) -> bool:
        return version.policy == self._settings.policy

    async def _set_status(
        self, version: PolicyVersion, status: VersionStatus, verdict: Mapping[str, Any] | None = None
    ) -> None:
        def write() -> None:
            with self._database.write() as conn:
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
        if line != self._said:
            self._said = line
            logger.warning("%s", line)


def _verdict_of(error: EngineError) -> dict[str, Any]:
    numbers = dict(error.verdict) if isinstance(error, RejectedError) else {"result": "rejected"}
    return {**numbers, "reason": str(error)}


async def publish(app: ProxyApp) -> None:
    """The proxy's background task: owns a client of the engine for as long as it runs."""
    from ..engine.client import EngineClient
    from ..engine.fingerprint import read_fingerprint

    key = app.settings.engine_api_key
    async with EngineClient(
        app.settings.engine_url, api_key=None if key is None else key.get_secret_value()
    ) as client:

        async def seen() -> None:
            await app.set_fingerprint(await read_fingerprint(client))

        await Publisher(app.database, client, app.live, app.settings, on_engine_seen=seen).run()
