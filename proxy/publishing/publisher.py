"""The one owner of what is live: takes candidates from the database through load, probe, live, drain,
retired.

Driven by rows: the trainer and people (store/promotion.py) only write them. Owns the order of a turn: engines
first (rotation.py), then rows that somebody has flipped by hand (flipped.py), then candidates
(candidates.py), then what was live (drained.py). Canaries are judged before candidates (canary.py).
"""

from __future__ import annotations

import logging

from ...errors import LightningError
from ...records import VersionStatus
from ...settings.proxy import ProxySettings
from ...store.database import Database
from ...store.policies import IN_HAND, versions_with_status
from ...store.policy_requests import waiting_requests
from ..live.served import BASE_VERSION
from .arrival import Seen, rows_by_kind
from .canary import Canaries, Plan
from .candidates import Candidates
from .drained import Drained
from .evaluation import Evaluation, OpenDoor
from .flipped import Flipped
from .place import Handle, Place
from .rests import Rests
from .rotation import Rotation
from .version_log import Notices, VersionLog

logger = logging.getLogger("lightning.publisher")


class Publisher:
    """One per log. `turn` never raises what can be waited out; `step` is the same for tests."""

    def __init__(
        self,
        database: Database,
        place: Place,
        settings: ProxySettings,
        *,
        on_engine_seen: Seen | None = None,
        open_door: OpenDoor | None = None,
    ) -> None:
        """`open_door`: how an evaluation's command reaches a version; needed where the settings name one."""
        self._place = place
        self._policy = settings.policy
        self._log = VersionLog(database, place.fleet)
        self._notices = Notices()
        seen = on_engine_seen or _nothing_to_write
        self.rotation = Rotation(place, self._log, self._notices, policy=settings.policy, seen=seen)
        evaluation = None
        if settings.evaluation is not None:
            assert open_door is not None, "an evaluation asks the version"
            evaluation = Evaluation(settings.evaluation, open_door)
        self._candidates = Candidates(
            place,
            self._log,
            self._notices,
            policy=settings.policy,
            evaluation=evaluation,
            canary=Plan.of(settings),
        )
        self.canaries = Canaries(place, self._log, self._notices)
        self._rests = Rests(place, self._log, self._notices)
        self._drained = Drained(place, self._log)
        self._flipped = Flipped(place, self._log)

    async def take_over(self, *, was_open: bool) -> None:
        """This proxy publishes from now on. What another has left half done is set up anew, by the log."""
        rows = await self._log.read(
            lambda conn: versions_with_status(conn, VersionStatus.LIVE, VersionStatus.CANARY)
        )
        target = rows_by_kind(rows, self._policy)
        live, held = self._place.live, self._place.engines.holding
        logged = {row.policy: row.version for row in (*target.adapters, *filter(None, [target.full]))}
        canaries = {row.policy: row.version for row in target.canaries}
        is_as_logged = (
            all(live.live_version(name) == version for name, version in logged.items())
            and all(live.canary_version(name) == canaries.get(name) for name in live.policies)
            and all(live.live_version(name) == BASE_VERSION for name in live.policies if name not in logged)
            and all(held.adapters.get(name) == path for name, path in target.holding().adapters.items())
            and held.label == target.holding().label
        )
        if not (was_open and is_as_logged):
            live.forget_engine()

    async def turn(self) -> None:
        """`step`, whatever it raises."""
        try:
            await self.step()
        except Exception as error:  # noqa: BLE001 - the boundary of the task: one bad version must not end all publishing
            self._notices.broke(error)

    async def step(self) -> None:
        """Look at the engines, set up those that are new, take candidates, unload what has drained."""
        self._notices.begin()
        try:
            try:
                await self.rotation.look()
            finally:
                await self._place.fleet.release()  # closed at start or by a set-up; a swap releases its own
            await self._flipped.take_back()
            await self.canaries.look()
            await self._rests.look()
            for version in await self._log.read(lambda conn: versions_with_status(conn, *IN_HAND)):
                await self._candidates.publish(version)
            for request in await self._log.read(waiting_requests):
                if request.version == BASE_VERSION:
                    await self._candidates.serve_base(request)
            await self._place.fleet.release()  # after a rest without a new version
            await self._drained.unload()
        except LightningError as error:
            self._notices.say(str(error))
        self._notices.end()


async def _nothing_to_write(_: Handle) -> None:
    return None
