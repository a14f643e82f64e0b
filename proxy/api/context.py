"""The FastAPI application: what its routes are given, and the one line that each error becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ... import __version__
from ...errors import LightningError, StoreError, UnknownEpisodeError, UserError
from ...settings import ProxySettings
from ...store.database import Database
from ..lineage import Lineage
from ..policies import LivePolicies
from ..recorder import Recorder

T = TypeVar("T")

FLUSH_TIMEOUT_SEC = 10.0


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the routes use."""

    database: Database
    recorder: Recorder
    live: LivePolicies
    lineage: Lineage
    settings: ProxySettings

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


def create_api(context: ApiContext) -> FastAPI:
    # Here, not above: the routers import this module.
    from . import episodes, policies, rewards, status

    app = FastAPI(
        title="lightning proxy",
        version=__version__,
        openapi_url="/lightning/api/openapi.json",
        docs_url="/lightning/api/docs",
        redoc_url=None,
    )
    app.state.context = context
    for module in (episodes, rewards, policies, status):
        app.include_router(module.router)
    app.add_exception_handler(LightningError, _lightning_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _error(status: int, message: str) -> JSONResponse:
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


async def _lightning_error(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownEpisodeError):
        return _error(404, str(error))
    if isinstance(error, UserError):
        return _error(400, str(error))
    return _error(503, str(error))


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return _error(422, f"{where}: {first['msg']}{more}")


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))
