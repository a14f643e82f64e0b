"""Versions that were live: unloaded once nothing needs them, drain -> retired.

Owns when an adapter may be taken out of the engines. Which version took its place is candidates.py's matter.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...store.policies import load_version, versions_with_status
from ..live.served import BASE_VERSION, adapter_name
from .place import Place
from .version_log import VersionLog

MAX_DRAINING = 2  # older ones are unloaded although episodes are pinned to them


class Drained:
    def __init__(self, place: Place, log: VersionLog) -> None:
        self._place = place
        self._log = log
        self._rejected: dict[str, PolicyVersion] = {}  # by name in the engine: loaded, and no longer to be

    async def unload(self) -> None:
        draining = await self._log.read(lambda conn: versions_with_status(conn, VersionStatus.DRAINING))
        by_policy: dict[str, list[PolicyVersion]] = {}
        for row in draining:
            by_policy.setdefault(row.policy, []).append(row)
        for rows in by_policy.values():
            for newer, row in enumerate(reversed(rows)):
                if row.kind is WeightsKind.FULL or await self._is_out(row, is_surplus=newer >= MAX_DRAINING):
                    await self._log.set_status(row, VersionStatus.RETIRED)
        await self._unload_rejected({adapter_name(row.policy, row.version) for row in draining})

    async def _unload_rejected(self, draining: Collection[str]) -> None:
        """An older adapter that a person wanted back, and that failed its probe: no episode stays on it."""
        live = self._place.live
        for policy in live.policies:
            for version, name in live.loaded_versions(policy).items():
                if version in (live.live_version(policy), BASE_VERSION) or name in draining:
                    continue
                row = await self._log.read(partial(load_version, policy=policy, version=version))
                if row is not None and row.status is VersionStatus.REJECTED:
                    self._rejected[name] = row
        for name, row in list(self._rejected.items()):
            if await self._is_out(row, is_surplus=True):
                del self._rejected[name]

    async def _is_out(self, row: PolicyVersion, *, is_surplus: bool) -> bool:
        """Unload an adapter if nothing needs it; whether it is out of every engine."""
        place, fleet = self._place, self._place.fleet
        name = adapter_name(row.policy, row.version)
        if row.version in place.live.loaded_versions(row.policy):
            answering = fleet.is_answering(row.policy, row.version)
            if answering or (fleet.is_in_use(row.policy, row.version) and not is_surplus):
                return False
            place.live.drop(row.policy, row.version)
            place.engines.holding = place.engines.holding.without_adapter(name)
            await fleet.announce()
        if not fleet.is_told or fleet.is_answering(row.policy, row.version):
            return False  # another proxy may still send a call there; the next step looks again
        # Also one that an earlier proxy had loaded: the trainer may delete its folder from now on.
        await place.on_each(lambda handle: handle.client.unload_lora(name))
        return True
