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

RETRY_SEC = 1.0

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
    """Background task of a proxy that does not publish: until the engine has been seen once."""
    said = ""
    async with _client(app.settings) as client:
        while app.live.base_model is None:
            try:
                model = await client.base_model()
                await app.set_fingerprint(await read_fingerprint(client))
                app.live.set_base_model(model.name)
            except EngineError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s", said)
                await asyncio.sleep(RETRY_SEC)
