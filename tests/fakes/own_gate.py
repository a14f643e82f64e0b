"""`place.Fleet` of one proxy that shares its log with nobody: publishing without rows that others read."""

from __future__ import annotations

import sqlalchemy as sa

from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.publishing.place import BusyError


class OwnGate:
    def __init__(self, live: LivePolicies) -> None:
        self._live = live

    async def hold(self, *, drains: bool, timeout_sec: float) -> None:
        gate = self._live.gate
        gate.hold()
        if not drains:
            return
        try:
            await gate.drained(timeout_sec)
        except TimeoutError:
            running = gate.in_flight
            gate.open()
            raise BusyError(f"{running} calls were still running after {timeout_sec:g} s") from None

    async def release(self) -> None:
        self._live.gate.open()

    async def announce(self) -> None:
        pass  # who would listen?

    async def prepare(self, *, is_changing: bool) -> None:
        pass

    def require_lease(self) -> None:
        pass

    def require_lease_in(self, conn: sa.Connection) -> None:
        pass

    @property
    def is_told(self) -> bool:
        return True

    def is_answering(self, policy: str, version: int) -> bool:
        return self._live.is_answering(policy, version)

    def is_in_use(self, policy: str, version: int) -> bool:
        return self._live.is_in_use(policy, version)
