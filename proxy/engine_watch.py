"""The engine at start, and all that a proxy does about it that publishes nothing.

With `publish` the publisher owns what is live; without, the engine's base model is what serves the policy,
and somebody has to find out its name and fingerprint.
"""

from __future__ import annotations

import asyncio
import logging

from ..engine.client import EngineClient, EngineGoneError
from ..engine.fingerprint import read_fingerprint
from ..errors import EngineError
from ..settings import ProxySettings
from .app import ProxyApp
from .swap import BASE_LABEL

LOOK_SEC = 1.0

logger = logging.getLogger("lightning.proxy")


def _client(settings: ProxySettings) -> EngineClient:
    key = settings.engine_api_key
    return EngineClient(settings.engine_url, api_key=None if key is None else key.get_secret_value())


async def require_engine(settings: ProxySettings) -> None:
    """Raises EngineError with the next step when the engine does not answer, or serves no base model."""
    async with _client(settings) as client:
        try:
            await client.base_model()
        except EngineGoneError as error:
            raise EngineError(
                f"{error}; start one with `lightning engine serve MODEL`, "
                "or start the proxy with --no-engine-check"
            ) from None


async def watch_engine(app: ProxyApp) -> None:
    """Background task of a proxy that does not publish: is the engine there, with its base model?"""
    said = ""
    await app.gate.close(0)  # calls wait for the first look, instead of being refused
    async with _client(app.settings) as client:
        while True:
            try:
                await _look(app, client)
                said = ""
            except EngineError as error:
                app.live.forget_engine()
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s", said)
            finally:
                app.gate.open()
            await asyncio.sleep(LOOK_SEC)


async def _look(app: ProxyApp, client: EngineClient) -> None:
    label = await client.weight_label()
    if label not in (None, BASE_LABEL):
        raise EngineError(
            f"the engine holds {label!r}, which somebody has published: which version answers can't be known "
            "here, so the policy is not served; use the proxy that publishes, or restart the engine"
        )
    model = await client.base_model()
    if app.live.base_model != model.name:
        await app.set_fingerprint(await read_fingerprint(client))
        app.live.set_base_model(model.name)
