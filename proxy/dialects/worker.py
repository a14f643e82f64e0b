"""The translator: a process of its own in which LiteLLM lives (`python -m …dialects.worker`).

Owns LiteLLM's import and its calls. Reads its start-up line from stdin, serves on a unix socket, ends when
stdin ends (with the proxy, however that ends). Knows nothing of episodes, tokens or the log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
import uvicorn

from ..transport.client import BodyTooLargeError, Client, ClientGoneError, Receive, Scope, Send
from . import shape
from .vendors import Vendors
from .wire import ANSWER_ID, FAULT_STATUS, HOP_URL, KEEP_ALIVE_SEC, SECRET, SHOWN_MODEL, TOKEN, StartUp

ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download at import
    # A policy that repeats itself is the trainer's business, not a reason to end its answer.
    "REPEATED_STREAMING_CHUNK_LIMIT": str(2**31),
}
MODEL = "hosted_vllm/policy"
"""LiteLLM decides by the model's name what to leave out, so it is told one that it knows nothing about."""
TIMEOUT_SEC = 7 * 24 * 3600.0
"""LiteLLM's own is ten minutes; how long an answer may take is the agent's business."""
MAX_BODY_BYTES = 2**31
_TOLD = {
    "messages": (
        "max_tokens",
        "messages",
        "stop_sequences",
        "system",
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
    ),
    "responses": (
        "input",
        "instructions",
        "max_output_tokens",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_p",
    ),
}
"""What LiteLLM is told of an agent's body; the rest the hop puts into the chat request (translatable.py)."""


class Worker:
    """ASGI application."""

    def __init__(self, start_up: StartUp, litellm: Any) -> None:
        self._secret = start_up.secret.encode()
        self._litellm = litellm
        self._start_up = start_up
        self._vendors: Vendors | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = Client(receive, send, MAX_BODY_BYTES)
        if not hmac.compare_digest(headers.get(SECRET, "").encode(), self._secret):
            await client.refuse(401, "wrong secret")
            return
        try:
            doc = orjson.loads(await client.body())
        except (BodyTooLargeError, ClientGoneError, orjson.JSONDecodeError):
            await client.refuse(400, "not a JSON body")
            return
        client.watch()
        try:
            await self._answer(scope["path"], doc, headers, client)
        except asyncio.CancelledError:
            if not client.was_interrupted():
                raise
        finally:
            client.close()

    async def _answer(
        self, path: str, doc: dict[str, Any], headers: Mapping[str, str], client: Client
    ) -> None:
        if path.startswith("/vendor/"):
            await self._vendor(path.removeprefix("/vendor/"), doc, headers, client)
            return
        model = headers.get(SHOWN_MODEL)
        shown = shape.Shown(
            headers[ANSWER_ID], None if model is None else orjson.loads(model.encode("latin-1")), doc
        )
        target = {
            "api_base": headers[HOP_URL],
            "api_key": headers[TOKEN],
            "model": MODEL,
            "timeout": TIMEOUT_SEC,
        }
        try:
            if path == "/messages":
                await self._messages(doc, shown, target, client)
            else:
                await self._responses(doc, shown, target, client)
        except Exception as error:  # noqa: BLE001 - the boundary to LiteLLM, which raises what it likes
            if client.has_started:
                raise BrokenAnswerError(f"{type(error).__name__}: {error}") from None
            await client.send_json(FAULT_STATUS, {"message": f"{type(error).__name__}: {error}"[:2000]})

    async def _vendor(
        self, dialect: str, doc: dict[str, Any], headers: Mapping[str, str], client: Client
    ) -> None:
        if self._vendors is None:
            self._litellm.use_chat_completions_url_for_anthropic_messages = True
            self._vendors = Vendors(self._litellm, self._start_up.vendors)
        vendors, name = self._vendors, orjson.loads(headers[SHOWN_MODEL].encode("latin-1"))
        shown = shape.Shown(headers[ANSWER_ID], name, doc)
        try:
            await vendors.answer(dialect, doc, shown, client)
        except Exception as error:  # noqa: BLE001 - the boundary to LiteLLM, which raises what it likes
            if client.has_started:
                raise BrokenAnswerError(type(error).__name__) from None
            status = getattr(error, "status_code", None)
            status = status if isinstance(status, int) and 400 <= status < 599 else 502
            message = vendors.without_keys(str(getattr(error, "message", error)))
            await client.send_json(status, {"message": message[:2000]})

    async def _messages(
        self, doc: dict[str, Any], shown: shape.Shown, target: dict[str, Any], client: Client
    ) -> None:
        streams = doc.get("stream") is True
        answer = await self._litellm.anthropic.messages.acreate(
            **_told("messages", doc), **target, stream=streams, max_retries=0, num_retries=0
        )
        if not streams:
            await client.send_json(200, shape.message(_plain(answer), shown))
            return
        await _stream(client, (shape.message_event(event, shown) async for event in _message_events(answer)))

    async def _responses(
        self, doc: dict[str, Any], shown: shape.Shown, target: dict[str, Any], client: Client
    ) -> None:
        streams = doc.get("stream") is True
        asked = _told("responses", doc)
        asked["tools"] = [tool for tool in doc.get("tools") or () if tool.get("type") == "function"] or None
        answer = await self._litellm.aresponses(
            **asked, **target, stream=streams, use_chat_completions_api=True, max_retries=0, num_retries=0
        )
        if not streams:
            await client.send_json(200, shape.response(_plain(answer), shown))
            return
        await _stream(client, (shape.response_event(_plain(event), shown) async for event in answer))


def _told(dialect: str, doc: Mapping[str, Any]) -> dict[str, Any]:
    return {name: doc[name] for name in _TOLD[dialect] if name in doc}


class BrokenAnswerError(Exception):
    """The answer can't be finished: the server must close the connection without a clean end."""


async def _stream(client: Client, events: AsyncIterator[dict[str, Any]]) -> None:
    first = await anext(events, None)  # a refusal must still be able to become a status
    await client.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
    while first is not None:
        if first.get("type") == "error":  # LiteLLM's words; whoever saw the engine's own stream knows better
            raise BrokenAnswerError
        data = orjson.dumps(first)
        await client.write(b"event: " + str(first.get("type")).encode() + b"\ndata: " + data + b"\n\n")
        first = await anext(events, None)
    await client.write(b"", is_last=True)


async def _message_events(answer: Any) -> AsyncIterator[dict[str, Any]]:
    """LiteLLM gives events as SSE bytes, or as dictionaries."""
    async for piece in answer:
        if isinstance(piece, dict):
            yield piece
            continue
        text = piece if isinstance(piece, bytes) else str(piece).encode()
        for line in text.split(b"\n"):
            if line.startswith(b"data: {"):
                yield orjson.loads(line[6:])


def _plain(value: Any) -> dict[str, Any]:
    """A pydantic model, or already a dictionary, as JSON values; enums and nested models included."""
    plain: dict[str, Any] = value if isinstance(value, dict) else value.model_dump(mode="json")
    return plain


def _import_litellm() -> Any:
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    for name in ("NO_PROXY", "no_proxy"):  # the hop is on this machine, whatever the way to the vendors is
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    import litellm

    for name in ("LiteLLM", "LiteLLM Router"):  # errors are answers here, and tracebacks quote conversations
        logging.getLogger(name).setLevel(logging.CRITICAL)
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


def main() -> None:
    """Serve until stdin ends."""
    start_up = StartUp.read(sys.stdin.buffer.readline())
    ready = os.dup(1)
    os.dup2(2, 1)  # whatever LiteLLM prints is not an answer
    litellm = _import_litellm()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            os.write(ready, b"ready\n")

    config = uvicorn.Config(
        Worker(start_up, litellm),
        uds=start_up.socket_path,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_SEC,
    )
    server = Server(config)

    def end_with_the_proxy() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=end_with_the_proxy, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
