"""The engines at start, and all that a proxy does about them that publishes nothing.

With `publish` the publisher owns what is live; without, the engines' base model is what serves the policy,
and somebody has to find out its name and fingerprint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence

from ..engine.client import EngineClient, EngineGoneError
from ..errors import EngineError
from ..settings.proxy import ProxySettings
from .app import ProxyApp
from .live.engines import Holding
from .oddities import is_proxy
from .publishing.place import BASE_LABEL, Handle, what_is_missing

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


async def require_engine(settings: ProxySettings) -> set[str]:
    """The names of the engines' models; of another proxy as an engine it warns.

    Raises EngineError with the next step when no engine answers, or one serves no base model.
    """
    names: set[str] = set()
    gone: EngineGoneError | None = None
    is_there = False
    for client in _clients(settings):
        try:
            await client.base_model()
            is_there = True
            names |= {model.name for model in await client.models()}
            if await is_proxy(client):
                logger.warning(
                    "the engine at %s is a lightning proxy itself: what is asked here is recorded there too; "
                    "give vLLM's own address",
                    client.url,
                )
        except EngineGoneError as error:
            gone = error
        finally:
            await client.close()
    if gone is not None and not is_there:
        raise EngineError(
            f"{gone}; start one with `lightning engine serve MODEL`, "
            "or start the proxy with --no-engine-check"
        ) from None
    return names


class EngineWatch:
    """Looks at the engines for a proxy that does not publish."""

    def __init__(self, app: ProxyApp, handles: Sequence[Handle]) -> None:
        self._app = app
        self._handles = handles
        self._looked_at_sec = float("-inf")
        self._said: dict[Handle, str] = {}

    async def turn(self, *, listed: Collection[str] | None) -> None:
        """One look, if it is time for one.

        `listed`: URLs of the engines that another proxy keeps in rotation. None: no proxy publishes, and what
        an engine holds is taken for the base model if nobody has published there.
        """
        engines = self._app.engines
        hurries = not engines.in_rotation or any(engine.is_suspect for engine in engines.all)
        wait_sec = LOOK_SEC / 4 if hurries else LOOK_SEC
        if time.monotonic() - self._looked_at_sec < wait_sec:
            return
        self._looked_at_sec = time.monotonic()
        await asyncio.gather(*(self._look_at(handle, listed) for handle in self._handles))
        if listed is not None:
            return
        if not engines.in_rotation:
            self._app.live.forget_engine()
            engines.holding = Holding()
        self._app.gate.open()

    async def _look_at(self, handle: Handle, listed: Collection[str] | None) -> None:
        app, state = self._app, handle.state
        try:
            if listed is None:
                await self._look(handle)
            elif state.url in listed:
                missing = await what_is_missing(handle.client, app.engines.holding, state.lacks)
                if missing is not None:
                    raise EngineError(f"the engine at {state.url}: {missing}")
                app.engines.admit_engine(state, fingerprint_id=state.fingerprint_id, lacks=state.lacks)
        except EngineError as error:
            app.engines.withdraw(state, is_up=not isinstance(error, EngineGoneError))
            if str(error) != self._said.get(handle):
                self._said[handle] = str(error)
                logger.warning("%s", error)
        else:
            self._said.pop(handle, None)

    async def _look(self, handle: Handle) -> None:
        app, state = self._app, handle.state
        label = await handle.client.weight_label()
        if app.engines.holding != Holding():  # of a proxy that has published, and is gone
            missing = await what_is_missing(handle.client, app.engines.holding, state.lacks)
            if missing is not None:
                raise EngineError(f"the engine at {state.url}: {missing}")
        elif label not in (None, BASE_LABEL):
            raise EngineError(
                f"the engine at {state.url} holds {label!r}, which somebody has published: which version "
                "answers can't be known here, so the policy is not served; use a proxy that publishes, or "
                "restart the engine"
            )
        model = await handle.client.base_model()
        if state in app.engines.in_rotation and app.live.base_model == model.name:
            state.is_suspect = False
            return
        if app.live.base_model not in (None, model.name) and app.engines.in_rotation not in ([], [state]):
            raise EngineError(
                f"the engine at {state.url} serves {model.name!r}, not {app.live.base_model!r} as the "
                "others: give it the same model and --served-model-name"
            )
        fingerprint_id = await app.fingerprint_of(handle.client)
        app.engines.admit_engine(state, fingerprint_id=fingerprint_id)
        if app.live.base_model != model.name:
            app.live.set_base_model(model.name)
