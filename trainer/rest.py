"""One GPU for engine and trainer: the engines rest while a step is computed (`share_gpu`).

The trainer asks through the log and waits; the publisher in the proxy puts them to sleep and wakes them
(proxy/publishing/rests.py). Owns when a rest begins and ends, and that it does not outlast the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from ..errors import PublishError
from ..settings.train import TrainSettings
from ..store.database import Database
from ..store.rests import rest_of, say_rest

POLL_SEC = 0.1
SOURCE = "trainer"


class EngineRest:
    """Of one run. Without `share_gpu` nothing here does anything."""

    def __init__(self, database: Database, settings: TrainSettings, run_id: str) -> None:
        self._database, self._run_id = database, run_id
        self._is_wanted, self._timeout_sec = settings.share_gpu, settings.publish_timeout_sec
        self._is_resting = False

    def begin(self, doing: Callable[[str], None]) -> None:
        """Returns when the engines sleep. PublishError where they can't, or nobody has answered in time."""
        if not self._is_wanted:
            return
        doing("waiting for the engines to rest")
        self._is_resting = True
        with self._database.write() as conn:
            say_rest(conn, self._run_id, "engine_rest", source=SOURCE)
        until = time.monotonic() + self._timeout_sec
        while True:
            with self._database.read() as conn:
                rest = rest_of(conn, self._run_id)
            if rest is not None and rest.state == "engine_asleep":
                return
            if rest is not None and rest.state == "engine_refused":
                self._is_resting = False
                raise PublishError(f"the GPU can't be shared: {rest.note}")
            if time.monotonic() > until:
                self.end()
                raise PublishError(
                    f"the engines did not go to rest within {self._timeout_sec:g} s: start the proxy that "
                    "publishes (lightning proxy serve), see its log, or train without --share-gpu"
                )
            time.sleep(POLL_SEC)

    def end_in(self, conn: sa.Connection) -> None:
        """In the transaction that hands over what was trained."""
        if self._is_resting:
            say_rest(conn, self._run_id, "engine_wake", source=SOURCE)
            self._is_resting = False

    def end(self) -> None:
        """However the step has ended."""
        if self._is_resting:
            with self._database.write() as conn:
                self.end_in(conn)
