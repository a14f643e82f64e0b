"""Whether the engine is there, and the name of its base model: what serving needs to know at start.

Asks nothing but the public list of models. What is loaded and live later is the publisher's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from ..errors import EngineError
from ..settings import ProxySettings
from .app import ProxyApp

ASK_TIMEOUT_SEC = 10.0
RETRY_SEC = 1.0

logger = logging.getLogger("lightning.proxy")


async def read_base_model(settings: ProxySettings) -> str:
    """The name under which the engine serves its base model. Raises EngineError with the next step."""
    key = settings.engine_api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
    url = f"{settings.engine_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_SEC)) as session,
            session.get(url, headers=headers) as answer,
        ):
            if answer.status in (401, 403):
                raise EngineError(
                    f"{url} refuses the key; set LIGHTNING_PROXY_ENGINE_API_KEY to the engine's"
                )
            if answer.status != 200:
                raise EngineError(
                    f"{url} answers {answer.status}; is that the root URL of vLLM, without /v1?"
                )
            doc = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise EngineError(
            f"no engine at {settings.engine_url} ({reason}); start one with `lightning engine serve MODEL`, "
            "or start the proxy with --no-engine-check"
        ) from None
    return _base_of(doc, url)


def _base_of(doc: Any, url: str) -> str:
    cards = doc.get("data") if isinstance(doc, dict) else None
    for card in cards if isinstance(cards, list) else []:
        if isinstance(card, dict) and card.get("parent") is None and isinstance(card.get("id"), str):
            return str(card["id"])  # adapters have a parent
    raise EngineError(f"{url} lists no base model; is that vLLM?")


async def watch_engine(app: ProxyApp) -> None:
    """Background task: until the engine has been seen once."""
    while app.live.base_model is None:
        try:
            app.live.set_base_model(await read_base_model(app.settings))
        except EngineError as error:
            logger.debug("%s", error)
            await asyncio.sleep(RETRY_SEC)
