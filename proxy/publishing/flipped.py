"""Rows that say live of a version that is not: somebody has written them by hand, or too early.

What serves is what was loaded and proven. Such a version becomes a candidate and goes the way of every other;
the one that serves is live again. Owns nothing but that correction.
"""

from __future__ import annotations

import logging

from ...records import PolicyVersion, VersionStatus
from ...store.policies import load_version, versions_with_status
from .place import Place
from .version_log import VersionLog

logger = logging.getLogger("lightning.publisher")


class Flipped:
    def __init__(self, place: Place, log: VersionLog) -> None:
        self._place = place
        self._log = log

    async def take_back(self) -> None:
        """Harmless where rows and engines agree. Call between two versions, never while one is on its way."""
        if self._place.live.base_model is None:
            return  # nothing serves: whatever the rows say is proven as it is set up
        rows = await self._log.read(lambda conn: versions_with_status(conn, VersionStatus.LIVE))
        marked = {(row.policy, row.version) for row in rows}
        for row in rows:
            serving = self._place.live.live_version(row.policy)
            if serving == row.version:
                continue
            if serving is not None and row.version < serving and (row.policy, serving) in marked:
                await self._log.set_status(row, VersionStatus.DRAINING)  # it was live, until the other was
                continue
            logger.warning(
                "version %d of %r is marked as live, and version %s serves: it is loaded and proven first",
                row.version,
                row.policy,
                serving,
            )
            await self._log.set_status(row, VersionStatus.CANDIDATE)
            if serving is not None:
                await self._mark_live(row.policy, serving)

    async def _mark_live(self, policy: str, version: int) -> None:
        """As it was before somebody flipped the other one."""
        row: PolicyVersion | None = await self._log.read(lambda conn: load_version(conn, policy, version))
        if row is not None and row.status is not VersionStatus.LIVE:  # the base model has no row
            await self._log.set_status(row, VersionStatus.LIVE)
