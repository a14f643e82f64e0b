"""Asking the engine that a call was given to, and the next one where nobody listens there.

Owns when a call may move: only before a byte was sent. Knows nothing of what is asked or answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import EngineError
from .live.engines import Engines, EngineState
from .live.served import Lease
from .transport.headers import Headers
from .transport.upstream import CONNECT_FAILURES, FAILURES, EngineAnswer, Upstream

logger = logging.getLogger("lightning.relay")


def give_engine(engines: Engines, lease: Lease, model: str | None, episode_id: str | None) -> None:
    """Choose the engine of an admitted call. Raises EngineError where none is left."""
    served = lease.served
    lease.use(engines.choose(episode_id, served.model or model, any_engine=served.policy is None))


class Asking:
    """A call's requests to its engine. `moved` is told of the engine that a call has moved to."""

    __slots__ = ("_engines", "_episode_id", "_lease", "_model", "_moved", "_tried", "_upstream")

    def __init__(
        self,
        engines: Engines,
        upstream: Upstream,
        lease: Lease,
        model: str | None,
        episode_id: str | None,
        *,
        moved: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._lease = lease
        self._model = model
        self._episode_id = episode_id
        self._moved = moved
        self._tried: list[EngineState] = []

    async def post(
        self, path_and_query: str, headers: Headers, body: bytes, *, wants_plain: bool
    ) -> EngineAnswer:
        """As Upstream.send. Raises one of FAILURES when no engine that may serve the call hears it."""
        while True:
            engine = self._lease.engine
            assert engine is not None, "give_engine has chosen one"
            try:
                return await self._upstream.send(
                    engine.url, "POST", path_and_query, headers, body, wants_plain=wants_plain
                )
            except CONNECT_FAILURES as error:
                self._engines.refused(engine)
                self._tried.append(engine)
                if not self._move():
                    raise
                logger.warning("%s is not reachable (%s): a call moves on", engine.url, error)
            except FAILURES:
                engine.is_suspect = True
                raise

    def _move(self) -> bool:
        """To another engine that holds the same; False where there is none."""
        served = self._lease.served
        try:
            other = self._engines.choose(
                self._episode_id,
                served.model or self._model,
                any_engine=served.policy is None,
                tried=self._tried,
            )
        except EngineError:
            return False
        self._lease.use(other)
        if self._moved is not None:
            self._moved(other)
        return True
