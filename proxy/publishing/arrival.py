"""Brings an engine to what the log says is live, before it gets a call.

Owns how one engine is set up and looked at. Which engines, which versions, and what becomes of a version that
no engine can hold, is the publisher's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ...engine.client import EngineGoneError, EngineModel
from ...errors import EngineError, PublishError
from ...records import PolicyVersion, VersionStatus, WeightsKind
from ..live.engines import Holding
from ..live.served import adapter_name
from .place import BASE_LABEL, Engine, Handle, RejectedError, label_of, what_is_missing
from .prober import Prober
from .swap import ensure_adapter, known_gap, load_weights
from .version_files import FilesError, check_files

logger = logging.getLogger("lightning.publisher")

Seen = Callable[[Handle], Awaitable[str | None]]
"""Told of an engine that is there; gives the id of its fingerprint."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an engine must hold to be in rotation. `older`: adapters that episodes are still pinned to;
    `canaries`: adapters that serve a share of the episodes that begin."""

    full: PolicyVersion | None
    adapters: tuple[PolicyVersion, ...]
    older: tuple[PolicyVersion, ...] = ()
    canaries: tuple[PolicyVersion, ...] = ()

    def holding(self) -> Holding:
        rows = (*self.adapters, *self.canaries, *self.older)
        return Holding(label_of(self.full), {adapter_name(r.policy, r.version): str(r.path) for r in rows})


@dataclass(frozen=True, slots=True)
class Arrived:
    """An engine that holds the target (of the older adapters, all but `lacks`)."""

    handle: Handle
    base: EngineModel
    fingerprint_id: str | None
    lacks: frozenset[str]


class CantHoldError(PublishError):
    """A version can't be brought onto this engine, by the version's own fault as far as is known."""

    def __init__(self, row: PolicyVersion, error: EngineError) -> None:
        super().__init__(f"version {row.version} of {row.policy!r} can't be brought back: {error}")
        self.row = row
        self.error = error


async def bring(handle: Handle, target: Target, seen: Seen) -> Arrived:
    """Raises CantHoldError; EngineError for what is no version's fault: that is waited out."""
    client = handle.client
    base = await client.base_model()
    if await client.is_asleep():  # whoever put it to sleep is gone
        logger.warning("the engine at %s sleeps; it is woken", handle.state.url)
        await client.wake()
    fingerprint_id = await seen(handle)
    await _bring_weights(client, base, target.full)
    for row in (*target.adapters, *target.canaries):
        await _bring_adapter(client, base, row)
    lacks = set()
    for row in target.older:
        try:
            await _bring_adapter(client, base, row)
        except EngineGoneError:
            raise
        except EngineError as error:
            logger.warning("%s: %s", handle.state.url, error)
            lacks.add(adapter_name(row.policy, row.version))
    return Arrived(handle, base, fingerprint_id, frozenset(lacks))


async def _bring_weights(client: Engine, base: EngineModel, full: PolicyVersion | None) -> None:
    label = await client.weight_label()
    if full is None or full.path is None:
        # Without the route nobody can have reloaded anything.
        if label is not None and label != BASE_LABEL:
            await load_weights(client, base.root, BASE_LABEL)
        return
    try:
        if label != label_of(full) or not await _is_proven(client, base.name, base, full):
            await check_version_files(full, base)
            await load_weights(client, full.path, label_of(full))
            await _prove(client, base.name, base, full)
    # What the engine can't do (a flag is missing, it is busy) is not the version's fault: wait it out.
    except (RejectedError, FilesError) as error:
        raise CantHoldError(full, error) from error


async def _bring_adapter(client: Engine, base: EngineModel, row: PolicyVersion) -> None:
    assert row.path is not None, "an adapter has a folder"
    name = adapter_name(row.policy, row.version)
    try:
        await ensure_adapter(client, name, row.path)
        await _prove(client, name, base, row)
    except (RejectedError, FilesError) as error:
        raise CantHoldError(row, error) from error


async def check_version_files(version: PolicyVersion, base: EngineModel) -> None:
    assert version.path is not None, "checked by the caller"
    path = Path(version.path)
    await asyncio.to_thread(check_files, path, version.kind, version.checksum, Path(base.root))


async def _prove(client: Engine, model: str, base: EngineModel, row: PolicyVersion) -> None:
    prober = Prober(client, row, max_model_tokens=base.max_model_tokens, known_gap_rms=known_gap(row))
    probed = await prober.after(model, None)
    if not probed.is_accepted:
        raise RejectedError(probed.reason, probed.numbers())


async def _is_proven(client: Engine, model: str, base: EngineModel, row: PolicyVersion) -> bool:
    """A label is only a note: somebody may have reloaded other weights under it."""
    try:
        await _prove(client, model, base, row)
    except RejectedError:
        return False
    return True


async def look(handle: Handle, holding: Holding | None) -> str | None:
    """Is the engine there, and (with `holding`) does it hold that? None: yes. Raises EngineError."""
    if holding is None:
        await handle.client.base_model()
        return None
    return await what_is_missing(handle.client, holding, handle.state.lacks)


def rows_by_kind(rows: Collection[PolicyVersion], policy: str) -> Target:
    """The versions that are live or canaries in the log, as a target; full weights only of the proxy's own
    policy."""
    full = next((r for r in rows if r.kind is WeightsKind.FULL and r.policy == policy), None)
    adapters = [row for row in rows if row.kind is WeightsKind.LORA]
    canaries = tuple(row for row in adapters if row.status is VersionStatus.CANARY)
    return Target(full, tuple(row for row in adapters if row not in canaries), canaries=canaries)
