"""Versions that were live: unloaded once nothing needs them, drain -> retired.

Owns when an adapter may be taken out of the engines. Which version took its place is candidates.py's matter.
"""

from __future__ import annotations

from ...records import PolicyVersion, VersionStatus, WeightsKind
from ...store.policies import versions_with_status
from ..live.policies import adapter_name
from .place import Place
from .version_log import VersionLog

MAX_DRAINING = 2  # older ones are unloaded although episodes are pinned to them


class Drained:
    def __init__(self, place: Place, log: VersionLog) -> None:
        self._place = place
        self._log = log

    async def unload(self) -> None:
        draining = await self._log.read(lambda conn: versions_with_status(conn, VersionStatus.DRAINING))
        by_policy: dict[str, list[PolicyVersion]] = {}
        for row in draining:
            by_policy.setdefault(row.policy, []).append(row)
        for rows in by_policy.values():
            for newer, row in enumerate(reversed(rows)):
                await self._retire_if_free(row, is_surplus=newer >= MAX_DRAINING)

    async def _retire_if_free(self, row: PolicyVersion, *, is_surplus: bool) -> None:
        if row.kind is WeightsKind.LORA:
            name = adapter_name(row.policy, row.version)
            if row.version in self._place.live.loaded_versions(row.policy):
                answering = self._place.fleet.is_answering(row.policy, row.version)
                if answering or (self._place.fleet.is_in_use(row.policy, row.version) and not is_surplus):
                    return
                self._place.live.drop(row.policy, row.version)
                self._place.engines.holding = self._place.engines.holding.without_adapter(name)
                await self._place.fleet.announce()
            if not self._place.fleet.is_told or self._place.fleet.is_answering(row.policy, row.version):
                return  # another proxy may still send a call there; the next step looks again
            # Also one that an earlier proxy had loaded: the trainer may delete its folder from now on.
            await self._place.on_each(lambda handle: handle.client.unload_lora(name))
        await self._log.set_status(row, VersionStatus.RETIRED)
