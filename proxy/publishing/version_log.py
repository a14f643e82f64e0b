"""The publisher's side of the log: statuses of versions under the lease, and what it says of its troubles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

from ...records import PolicyVersion, VersionStatus
from ...store.database import Database
from ...store.policies import set_version_status
from .place import Fleet

SOURCE = "publisher"

logger = logging.getLogger("lightning.publisher")

T = TypeVar("T")


class VersionLog:
    """Every status is written in a transaction that holds the lease."""

    def __init__(self, database: Database, fleet: Fleet) -> None:
        self._database = database
        self._fleet = fleet

    async def set_status(
        self,
        version: PolicyVersion,
        status: VersionStatus,
        verdict: Mapping[str, Any] | None = None,
        *,
        expects: Collection[VersionStatus] | None = None,
    ) -> None:
        """`expects`: WithdrawnError unless its status is one of these: somebody wants another version."""

        def write(conn: sa.Connection) -> None:
            name, number = version.policy, version.version
            set_version_status(conn, name, number, status, verdict=verdict, source=SOURCE, expects=expects)

        await self.write(write)

    async def write(self, write: Callable[[sa.Connection], None]) -> None:
        def inside() -> None:
            with self._database.write() as conn:
                self._fleet.require_lease_in(conn)
                write(conn)

        await asyncio.to_thread(inside)

    async def read(self, read: Callable[[sa.Connection], T]) -> T:
        def inside() -> T:
            with self._database.read() as conn:
                return read(conn)

        return await asyncio.to_thread(inside)


class Notices:
    """Once per run of the same trouble, not four times a second."""

    def __init__(self) -> None:
        self._said: frozenset[str] = frozenset()
        self._heard: set[str] = set()

    @property
    def heard(self) -> frozenset[str]:
        """In this turn so far."""
        return frozenset(self._heard)

    def begin(self) -> None:
        self._heard = set()

    def end(self) -> None:
        """What was not heard in this turn is news when it comes back."""
        self._said = self.heard

    def say(self, line: str) -> None:
        self._heard.add(line)
        if line not in self._said:
            logger.warning("%s", line)

    def broke(self, error: Exception) -> None:
        """The turn ended here, by a fault of ours: with its traceback, once."""
        line = f"publishing failed: {error!r}; going on"
        self._heard.add(line)
        if line not in self._said:
            logger.error("%s", line, exc_info=error)
        self.end()

    def repeat(self, lines: Iterable[str]) -> None:
        self._heard.update(lines)
