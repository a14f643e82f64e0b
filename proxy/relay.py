"""The hot path: one ASGI callable for everything that is the engine's.

Decides whether a request may pass, who is calling and whether it is a call to be recorded (exchange.py);
other public routes are streamed through here, both ways. Knows the engine's routes only through routes.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import orjson

from ..errors import EngineError, StoreError, UserError
from ..store.keys import EpisodeKey
from .attribution.address import Address, misspelt, read_address
from .attribution.keys import (
    REFUSAL,
    RefusedKeyError,
    check_query,
    check_url,
    holds_token,
    sent_keys,
)
from .exchange import serve_call
from .incoming import Incoming, Parts
from .live.engines import EngineState
from .live.served import Served, UnservedVersionError
from .messages.inject import Injection, inject
from .messages.request import read_request
from .messages.splice import Edit, apply, locate, parse
from .routes import Route, find_route, is_websocket_route
from .transport.client import TOO_LARGE, BodyTooLargeError, Client, ClientGoneError, Receive, Scope, Send
from .transport.headers import Headers
from .transport.upstream import CONNECT_FAILURES, FAILURES, EngineAnswer, response_headers
from .transport.websocket import pass_websocket, refuse_websocket

logger = logging.getLogger("lightning.relay")

_BODILESS = ("GET", "HEAD", "OPTIONS")


class Keys(Protocol):
    """The slice of attribution/keys.py that is asked."""

    async def find(self, keys: Sequence[bytes]) -> EpisodeKey | None: ...


class Relay:
    """ASGI application. `token` None: whoever reaches the port may use it."""

    def __init__(self, parts: Parts, *, token: str | None, max_body_bytes: int, keys: Keys) -> None:
        self._parts = parts
        self._keys = keys
        self._token = None if token is None else token.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        client = Client(receive, send, self._max_body_bytes)
        try:
            address, is_trusted = await self._admit(scope)
        except (UserError, StoreError) as error:
            status, text = _refusal(error)
            await client.refuse(status, text, retry_after_sec=1 if status == 503 else None)
            return
        route = find_route(address.engine_path)
        if route is None:
            hint = misspelt(scope["raw_path"])
            if hint is not None:
                await client.refuse(404, hint)
                return
            # Word for word what the engine says of routes that it does not have.
            await client.send_json(404, {"detail": "Not Found"})
            return
        is_call = route.dialect is not None and scope["method"] == "POST"
        if not (is_trusted or is_call or _shows_models(scope["method"], route)):
            await client.refuse(403, "an episode key is for calls that are recorded; send the proxy's token")
            return
        incoming = Incoming(route, address, headers, _path_and_query(address, scope))
        try:
            if is_call:
                await serve_call(self._parts, client, incoming)
            else:
                await self._pass(scope["method"], client, incoming)
        finally:
            client.close()

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's WebSocket routes, for whoever has the proxy's token: nothing of them is recorded."""
        try:
            address, is_trusted = await self._admit(scope)
            if not is_trusted:
                raise RefusedKeyError("an episode key is for calls that are recorded; send the proxy's token")
        except (UserError, StoreError) as error:
            status, text = _refusal(error)
            await refuse_websocket(send, status, text)
            return
        if not is_websocket_route(address.engine_path):
            await send({"type": "websocket.close"})  # 403, as the engine's own server says it
            return
        episode = address.marks[0][1] if address.marks else None
        engine = self._parts.engines.choose(episode, None, any_engine=True)
        await pass_websocket(
            "ws" + engine.url.removeprefix("http") + _path_and_query(address, scope),
            self._parts.upstream.request_headers(scope["headers"]),
            scope,
            receive,
            send,
        )

    async def _admit(self, scope: Scope) -> tuple[Address, bool]:
        """Who is calling, and whether with the proxy's own token. Raises UserError, StoreError."""
        check_query(scope["query_string"])
        sent = sent_keys(scope["headers"])
        key = await self._keys.find(sent)
        is_trusted = self._token is None or holds_token(sent, self._token)
        if not is_trusted and key is None:
            raise RefusedKeyError(REFUSAL)
        check_url(scope["raw_path"], scope["query_string"], self._token)
        address = read_address(scope["raw_path"], scope["headers"], sent)
        return (address if key is None else address.with_key(key.episode_id, key.agent)), is_trusted

    async def _pass(self, method: str, client: Client, incoming: Incoming) -> None:
        """A route without a row: stream the request up and the answer down."""
        shows_models = _shows_models(method, incoming.route)
        try:
            body, injection = await self._read_request(method, client, incoming.header(b"content-type"))
        except BodyTooLargeError:
            await client.refuse(413, TOO_LARGE)
            return
        except UnservedVersionError as error:
            await client.refuse(404, str(error))
            return
        except ClientGoneError:
            return
        try:
            answer = await self._send(
                method, incoming, body, wants_plain=injection is not None or shows_models
            )
        except FAILURES as error:
            engine = " or ".join(engine.url for engine in self._parts.engines.all)
            if client.sent_too_much:
                await client.refuse(413, TOO_LARGE)
            elif not client.gone:
                await client.refuse(502, f"the engine at {engine} is not reachable: {error}")
            return
        except asyncio.CancelledError:
            if client.was_interrupted():
                return
            raise
        try:
            await self._answer(client, answer, injection, shows_models)
        except asyncio.CancelledError:
            if not client.was_interrupted():
                raise
        finally:
            answer.close()

    async def _send(
        self,
        method: str,
        incoming: Incoming,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        wants_plain: bool,
    ) -> EngineAnswer:
        """Ask any engine that is up; where nobody listens, the next one."""
        engines = self._parts.engines
        marks = incoming.address.marks
        episode = marks[0][1] if marks else None
        engine = engines.choose(episode, None, any_engine=True)
        tried: list[EngineState] = []
        while True:
            try:
                return await self._parts.upstream.send(
                    engine.url,
                    method,
                    incoming.path_and_query,
                    incoming.headers,
                    body,
                    wants_plain=wants_plain,
                )
            except CONNECT_FAILURES:
                engines.refused(engine)
                tried.append(engine)
                if len(tried) == len(engines.all):
                    raise
                engine = engines.choose(episode, None, any_engine=True, tried=tried)

    async def _read_request(
        self, method: str, client: Client, content_type: str | None
    ) -> tuple[bytes | AsyncIterator[bytes] | None, Injection | None]:
        """The body to send: nothing, the stream itself, or JSON in which an alias has been resolved."""
        if method in _BODILESS:
            await client.body()
            client.watch()
            return None, None
        if content_type is not None and content_type.startswith("application/json"):
            body = await client.body()
            client.watch()
            request = read_request("plain", body)
            if request.model is None:
                return body, None
            served = self._served(request.model)
            if served is None or served.model is None:
                return body, None
            injection = inject(request, served.model, None)
            return injection.body, injection
        return _then_watch(client), None

    def _served(self, model: str) -> Served | None:
        try:
            return self._parts.live.resolve(model, None)
        except UnservedVersionError:
            raise
        except EngineError:
            return None

    async def _answer(
        self,
        client: Client,
        answer: EngineAnswer,
        injection: Injection | None,
        shows_models: bool,
    ) -> None:
        if answer.status == 200 and (injection is not None or shows_models):
            try:
                body = await answer.read()
            except FAILURES as error:
                await client.refuse(502, f"the engine's answer broke off: {error or type(error).__name__}")
                return
            doc = _json_object(body)
            if doc is not None:
                body = (
                    injection.undo_json(body, doc)
                    if injection is not None
                    else self._with_policies(body, doc)
                )
            await client.start(answer.status, response_headers(answer, len(body)))
            await client.write(body, is_last=True)
            return
        await client.start(answer.status, response_headers(answer))
        try:
            async for data in answer:
                await client.write(data)
        except FAILURES as error:
            logger.warning("the engine's answer broke off: %s", error)
            return  # without a clean end
        await client.write(b"", is_last=True)

    def _with_policies(self, body: bytes, doc: dict[str, Any]) -> bytes:
        """The engine's list of models and, behind it, the names under which policies are served."""
        cards = doc.get("data")
        if not isinstance(cards, list):
            return body
        by_id = {card.get("id"): card for card in cards if isinstance(card, dict)}
        added = [
            orjson.dumps({**by_id[model], "id": policy})
            for policy, model in self._parts.live.visible_models().items()
            if policy not in by_id and model in by_id
        ]
        spans = locate(body, {("data",)})
        if not added or not spans:
            return body
        end = spans[-1].end - 1  # before the closing bracket
        return apply(body, [Edit(end, end, b"," + b",".join(added))])


def _refusal(error: UserError | StoreError) -> tuple[int, str]:
    if isinstance(error, StoreError):
        return 503, f"the API key can't be looked up: {error}"
    return 401 if isinstance(error, RefusedKeyError) else 400, str(error)


def _path_and_query(address: Address, scope: Scope) -> str:
    query: bytes = scope["query_string"]
    return (address.engine_path + (b"?" + query if query else b"")).decode("latin-1")


def _shows_models(method: str, route: Route) -> bool:
    return (method, route.path) == ("GET", "/v1/models")


async def _then_watch(client: Client) -> AsyncIterator[bytes]:
    async for part in client.body_parts():
        yield part
    client.watch()


def _json_object(body: bytes) -> dict[str, Any] | None:
    doc = parse(body)
    return doc if isinstance(doc, dict) else None
