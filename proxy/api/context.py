"""What the API's routes are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from fastapi import Depends, Path, Query, Request
from pydantic import AfterValidator
from starlette.concurrency import run_in_threadpool

from ...errors import StoreError
from ...settings.proxy import ProxySettings
from ...store.database import Database
from ...store.names import checked_name
from ..attribution.lineage import Lineage
from ..live.engines import Engines
from ..live.policies import LivePolicies
from ..metrics import CallMetrics
from ..recorder import Recorder
from ..redaction import Redactor

T = TypeVar("T")

Name = Annotated[str, AfterValidator(checked_name)]
"""Of an episode, a task, a batch, an agent or a source: what a path or a header could carry, too."""

TimeMs = Annotated[int, Query(ge=-(2**53), le=2**53)]
ChoiceIndex = Annotated[int, Path(ge=0, le=2**31 - 1)]
"""Numbers that a database holds."""

FLUSH_TIMEOUT_SEC = 10.0


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the routes use."""

    database: Database
    recorder: Recorder
    live: LivePolicies
    engines: Engines
    lineage: Lineage
    settings: ProxySettings
    metrics: CallMetrics
    redactor: Redactor

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a write transaction, after the calls that the client has made before."""
        return await self._transact(self.database.write, work)

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        return await self._transact(self.database.read, work)

    async def _transact(self, begin: Callable[[], Any], work: Callable[[sa.Connection], T]) -> T:
        try:
            await asyncio.wait_for(self.recorder.flush(), FLUSH_TIMEOUT_SEC)
        except TimeoutError:
            raise StoreError("the log can't be written now; try again") from None

        def run() -> T:
            with begin() as conn:
                return work(conn)

        return await run_in_threadpool(run)


def _context_of(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context_of)]
"""A route's parameter of this type is filled in."""
