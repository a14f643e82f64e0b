"""One GPU for engine and trainer: while a run trains, the engines sleep and calls wait.

Owns the order: hold, drain, sleep, wait for the trainer, wake. Whatever ends the trainer wakes the engines:
its own word, the end of its run, or its silence. The gate stays closed when it is done: the version that the
trainer has left is published next, and whoever publishes opens it.
"""

from __future__ import annotations

import asyncio
import logging

from ...errors import EngineError
from ...store.rests import Rest, RestState, rest_of, rests, say_rest
from ...store.run_owners import SILENT_SEC
from .place import BusyError, Place
from .version_log import SOURCE, Notices, VersionLog

LOOK_SEC = 0.2

logger = logging.getLogger("lightning.publisher")


class Rests:
    def __init__(self, place: Place, log: VersionLog, notices: Notices) -> None:
        self._place = place
        self._log = log
        self._notices = notices

    async def look(self) -> None:
        """Returns when no run wants the engines to sleep (any more)."""
        for rest in await self._log.read(rests):
            if rest.state == "engine_rest" and _lives(rest):
                await self._let_rest(rest.run_id)

    async def _let_rest(self, run_id: str) -> None:
        place = self._place
        try:
            await place.fleet.hold(drains=True, timeout_sec=place.hold_timeout_sec)
        except BusyError as error:
            self._notices.say(f"run {run_id} waits for the engines to rest: {error}")
            return
        try:
            # Level 1: the weights come back as they were, for the probe's first look, and should it fail.
            await place.on_each(lambda handle: handle.client.sleep(1))
        except EngineError as error:
            await place.on_each(lambda handle: handle.client.wake())
            await self._say(run_id, "engine_refused", str(error))
            self._notices.say(str(error))
            await place.fleet.release()
            return
        await self._say(run_id, "engine_asleep")
        logger.info("the engines sleep while run %s trains", run_id)
        try:
            await self._wait(run_id)
        finally:
            await place.on_each(lambda handle: handle.client.wake())
        await self._say(run_id, "engine_awake")
        logger.info("the engines are awake")

    async def _wait(self, run_id: str) -> None:
        while True:
            rest = await self._log.read(lambda conn: rest_of(conn, run_id))
            if rest is None or rest.state != "engine_asleep":
                return
            if not _lives(rest):
                logger.warning("run %s has been silent for %.0f s: the engines wake", run_id, SILENT_SEC)
                return
            self._place.fleet.require_lease()
            await asyncio.sleep(LOOK_SEC)

    async def _say(self, run_id: str, state: RestState, note: str | None = None) -> None:
        await self._log.write(lambda conn: say_rest(conn, run_id, state, source=SOURCE, note=note))


def _lives(rest: Rest) -> bool:
    return rest.silent_ms < SILENT_SEC * 1000
