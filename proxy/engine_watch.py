"""The engines at start, and all that a proxy does about them that publishes nothing.

With `publish` the publisher owns what is live; without, the engines' base model is what serves the policy,
and somebody has to find out its name and fingerprint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from ..engine.client import EngineClient, EngineGoneError
from ..errors import EngineError
from ..settings import ProxySettings
from .app import ProxyApp
from .swap import BASE_LABEL, Handle

LOOK_SEC = 1.0

logger = logging.getLogger("lightning.proxy")


def _clients(settings: ProxySettings) -> list[EngineClient]:
    key = settings.engine_api_key
    return [
        EngineClient(url, api_key=None if key is None else key.get_secret_value())
        for url in settings.engine_url
    ]


@contextlib.asynccontextmanager
async def engine_handles(app: ProxyApp) -> AsyncIterator[list[Handle]]:
    """A client for each engine, closed at the end."""
    clients = _clients(app.settings)
    try:
        yield [Handle(client, state) for client, state in zip(clients, app.engines.all, strict=True)]
    finally:
        for client in clients:
            await client.close()


async def require_engine(settings: ProxySettings) -> None:
    """Raises EngineError with the next step when no engine answers, or one serves no base model."""
    gone: EngineGoneError | None = None
    is_there = False
    for client in _clients(settings):
        try:
            await client.base_model()
            is_there = True
        except EngineGoneError as error:
            gone = error
        finally:
            await client.close()
    if gone is not None and not is_there:
        raise EngineError(
            f"{gone}; start one with `lightning engine serve MODEL`, "
            "or start the proxy with --no-engine-check"
        ) from None


async def watch_engines(app: ProxyApp) -> None:
    """Background task of a proxy that does not publish: which engines are there, with their base model?"""
    said: dict[Handle, str] = {}
    app.gate.hold()  # calls wait for the first look, instead of being refused
    async with engine_handles(app) as handles:
        while True:
            await asyncio.gather(*(_look_at(app, handle, said) for handle in handles))
            if not app.engines.in_rotation:
                app.live.forget_engine()
            app.gate.open()
            await asyncio.sleep(LOOK_SEC)


async def _look_at(app: ProxyApp, handle: Handle, said: dict[Handle, str]) -> None:
    try:
        await _look(app, handle)
    except EngineError as error:
        app.engines.withdraw(handle.state, is_up=not isinstance(error, EngineGoneError))
        if str(error) != said.get(handle):
            said[handle] = str(error)
            logger.warning("%s", error)
    else:
        said.pop(handle, None)


async def _look(app: ProxyApp, handle: Handle) -> None:
    label = await handle.client.weight_label()
    if label not in (None, BASE_LABEL):
        raise EngineError(
            f"the engine at {handle.state.url} holds {label!r}, which somebody has published: which version "
            "answers can't be known here, so the policy is not served; use the proxy that publishes, or "
            "restart the engine"
        )
    model = await handle.client.base_model()
    if handle.state in app.engines.in_rotation and app.live.base_model == model.name:
        handle.state.is_suspect = False
        return
    if app.live.base_model not in (None, model.name) and app.engines.in_rotation not in ([], [handle.state]):
        raise EngineError(
            f"the engine at {handle.state.url} serves {model.name!r}, not {app.live.base_model!r} as the "
            "others: give it the same model and --served-model-name"
        )
    fingerprint_id = await app.fingerprint_of(handle.client)
    app.engines.admit_engine(handle.state, fingerprint_id=fingerprint_id)
    if app.live.base_model != model.name:
        app.live.set_base_model(model.name)
