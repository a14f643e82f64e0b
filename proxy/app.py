"""The proxy as one ASGI application: our API under `/lightning/` and `/healthz`, everything else the relay's.

Owns the lifetimes: recorder and upstream session start and end with the server, background tasks (the
publisher) run in between. The hot path never enters FastAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException

from ..engine.fingerprint import read_fingerprint
from ..errors import StoreError, UnknownEpisodeError
from ..records import PolicyVersion
from ..settings.proxy import ProxySettings
from ..store.append import add_fingerprint
from ..store.database import Database
from ..store.episodes import end_episode
from .api import ApiContext, create_api
from .attribution.inference import Inference
from .attribution.keys import EpisodeKeys, holds_token, sent_keys
from .attribution.kinds import Kinds
from .attribution.lineage import Lineage
from .dialects.front import DialectFront
from .dialects.hop import Hop
from .dialects.translator import Translator
from .evaluation_door import open_door
from .incoming import Parts
from .live.engines import Engines
from .live.gate import Gate
from .live.policies import LivePolicies
from .metrics import CallMetrics
from .providers import ProviderFront, vendors
from .publishing.evaluation import Door
from .recorder import Recorder
from .redaction import Redactor, rules_of
from .relay import Keys, Relay
from .strangers import stranger
from .transport.client import TOO_LARGE, Client, Message, Receive, Scope, Send
from .transport.upstream import Upstream
from .transport.websocket import refuse_websocket

logger = logging.getLogger("lightning.proxy")

Background = Callable[["ProxyApp"], Awaitable[None]]


class ProxyApp:
    """ASGI application. `background`: coroutines that run from start to shutdown, each given this object."""

    def __init__(
        self, settings: ProxySettings, database: Database, background: Sequence[Background] = ()
    ) -> None:
        self.settings = settings
        self.database = database
        self.gate = Gate()
        self.live = LivePolicies(
            settings.policy,
            settings.aliases,
            self.gate,
            agent_policies=settings.agent_policies,
            hold_max_sec=settings.hold_max_sec,
        )
        self.metrics = CallMetrics()
        self.redactor = _redactor(settings)
        self.recorder = Recorder(
            database,
            is_required=settings.recording == "required",
            prepare=self.redactor.prepare,
            observe=self.metrics.observe,
        )
        self.lineage = Lineage()
        self.engines = Engines(settings.engine_url)
        self._token = None if settings.token is None else settings.token.get_secret_value()
        self._allowed_hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._background = background
        self._tasks: list[asyncio.Task[None]] = []
        self._upstream: Upstream | None = None
        self._relay: Relay | None = None
        self._parts: Parts | None = None
        self.translator = Translator(vendors(settings.providers))
        self._hop: Hop | None = None
        self._api = create_api(
            ApiContext(
                database,
                self.recorder,
                self.live,
                self.engines,
                self.lineage,
                settings,
                self.metrics,
                self.redactor,
            )
        )

    @property
    def hop_url(self) -> str | None:
        """Where translated calls come back in; None before `start`."""
        return None if self._hop is None else self._hop.url()

    async def fingerprint_of(self, client: Any) -> str:
        """Read the engine's fingerprint into the log, so that calls can name it; gives its id."""
        fingerprint = await read_fingerprint(client)

        def write() -> None:
            with self.database.write() as conn:
                add_fingerprint(conn, fingerprint)

        await asyncio.to_thread(write)
        return fingerprint.id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        refusal = self._refusal(scope)
        assert self._relay is not None, "the lifespan has not started"
        if scope["type"] != "http":
            if refusal is not None:
                await refuse_websocket(send, 403, refusal)
            else:
                await self._relay.websocket(scope, receive, send)
        elif refusal is not None:
            await Client(receive, send, 0).refuse(403, refusal)
        elif scope["path"].startswith("/lightning/") or scope["path"] == "/healthz":
            await self._serve_api(scope, receive, send)
        else:
            await self._relay(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if self._token is not None or scope["path"] == "/healthz":
            return None
        return stranger(scope["headers"], self._allowed_hosts)

    async def _serve_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = self._token is None or scope["path"] == "/healthz"
        if not is_open and not holds_token(sent_keys(scope["headers"]), str(self._token).encode()):
            refusal = "wrong or missing token: send it as `Authorization: Bearer TOKEN`"
            await Client(receive, send, 0).refuse(401, refusal)
            return
        await self._api(scope, _capped(receive, self.settings.max_body_mb * 1024 * 1024), send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        key = self.settings.engine_api_key
        self._upstream = Upstream(None if key is None else key.get_secret_value())
        self.recorder.start()
        parts = Parts(
            live=self.live,
            recorder=self.recorder,
            upstream=self._upstream,
            engines=self.engines,
            lineage=self.lineage,
            holds_ends=self.settings.durability == "commit",
            inference=_inference(self.settings),
            kinds=Kinds(self.settings.kinds),
        )
        self._parts = parts
        self._relay, self._hop = self._make_relay(parts, self._token, EpisodeKeys(self.database))
        for run in self._background:
            self._tasks.append(asyncio.create_task(self._run(run)))

    def _make_relay(self, parts: Parts, token: str | None, keys: Keys) -> tuple[Relay, Hop]:
        settings = self.settings
        max_body_bytes = settings.max_body_mb * 1024 * 1024
        hop = Hop(parts, max_body_bytes)
        front = DialectFront(parts, self.translator, hop, translates=settings.dialects == "translate")
        whole = replace(parts, front=ProviderFront(parts, self.translator, settings.providers, front))
        return Relay(whole, token=token, max_body_bytes=max_body_bytes, keys=keys), hop

    def open_evaluation(self, version: PolicyVersion, model: str) -> AbstractAsyncContextManager[Door]:
        """Inside the block a command can reach that version, and nobody else can; `evaluation.OpenDoor`."""
        assert self._parts is not None, "started"
        return open_door(self._parts, self.live, self._make_relay, self._end_evaluation, version, model)

    async def _end_evaluation(self, episode: str) -> None:
        def end() -> None:
            # Where every call named an episode of its own there is none of this name.
            with contextlib.suppress(UnknownEpisodeError), self.database.write() as conn:
                end_episode(conn, episode, by="runner")

        try:
            await self.recorder.flush()
            await asyncio.to_thread(end)
        except StoreError as error:
            logger.warning("episode %s of an evaluation could not be ended: %s", episode, error)

    async def _run(self, run: Background) -> None:
        try:
            await run(self)
        except Exception:  # the boundary of a background task: the relay must go on
            logger.exception("a background task of the proxy ended")

    async def stop(self) -> None:
        """After the last connection has ended: write what is queued, end the rest."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._hop is not None:
            await self._hop.stop()
        await self.translator.stop()
        await self.recorder.stop()
        if self._upstream is not None:
            await self._upstream.close()


def _capped(receive: Receive, max_bytes: int) -> Receive:
    num_bytes = 0

    async def capped() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, TOO_LARGE)  # what the API's own handlers make an answer of
        return message

    return capped


def _redactor(settings: ProxySettings) -> Redactor:
    keys = [key.get_secret_value() for key in (settings.token, settings.engine_api_key) if key is not None]
    return Redactor(rules_of(settings.redact), keys)


def _inference(settings: ProxySettings) -> Inference | None:
    by_trace, by_prefix = settings.attribute_by_trace, settings.attribute_by_prefix
    return Inference(by_trace=by_trace, by_prefix=by_prefix) if by_trace or by_prefix else None
