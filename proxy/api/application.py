"""The FastAPI application: its routes, and the one line that each error becomes."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ... import __version__
from ...errors import LightningError, UnknownCallError, UnknownEpisodeError, UserError
from . import curation, episodes, metrics, policies, rewards, status
from .context import ApiContext
from .mistakes import one_line, refuse_unknown_query


def create_api(context: ApiContext) -> FastAPI:
    app = FastAPI(
        title="lightning proxy",
        version=__version__,
        openapi_url="/lightning/api/openapi.json",
        docs_url="/lightning/api/docs",
        redoc_url=None,
        dependencies=[Depends(refuse_unknown_query)],
    )
    app.state.context = context
    for module in (episodes, curation, rewards, policies, status, metrics):
        app.include_router(module.router)
    app.add_exception_handler(LightningError, _lightning_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _error(status: int, message: str) -> JSONResponse:
    headers = {"retry-after": "1"} if status == 503 else None
    shown = message.encode(
        "utf-8", "replace"
    ).decode()  # it may quote what can't be written, a lone surrogate
    return JSONResponse({"error": {"message": shown}}, status_code=status, headers=headers)


async def _lightning_error(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownEpisodeError | UnknownCallError):
        return _error(404, str(error))
    if isinstance(error, UserError):
        return _error(400, str(error))
    return _error(503, str(error))


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _error(422, one_line(error.errors()))


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))
