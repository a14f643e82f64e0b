"""The inner hop: where LiteLLM's chat request comes back to the proxy and becomes the agent's recorded call.

A listener on loopback, started with the first call. Each call has a token of its own, known to its translator
only and good for one request; behind it stands whose call it is. The exchange itself is the ordinary one
(exchange.py), so tokens, logprobs and the held end are exactly those of a chat call.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ...records import (
    Attribution,
    CallDelivered,
    CallEnd,
    CallIntent,
    CallStatus,
    LogEntry,
    Quarantine,
    token_ids,
)
from ..exchange import STOPPED, Exchange
from ..incoming import CallRecorder, Incoming, Parts, make_intent
from ..live.served import Lease
from ..messages.request import Request, read_request
from ..routes import Route
from ..transport.client import BodyTooLargeError, Client, ClientGoneError, Message, Receive, Scope, Send
from ..transport.inner_server import InnerServer
from .rendering import Rendered, render_headers
from .translatable import chat_body
from .wire import KEEP_ALIVE_SEC

CHAT = Route("/v1/chat/completions", "chat")
_STOP_STRING = re.compile(rb'"stop_reason"\s*:\s*("(?:[^"\\]++|\\.)*+")')
_SINGLE_CALL_STREAM = "parallel_tool_calls=false in a stream"
"""A reason of the chat route that does not hold here: nobody counts the empty deltas."""


@dataclass(slots=True)
class OuterCall:
    """One call of the agent's, while it is being translated. Below the line: what the inner hop has seen."""

    incoming: Incoming
    request: Request
    attribution: Attribution
    lease: Lease
    rendered: Rendered
    answer_id: str
    # ---
    client: Client | None = None
    intent: CallIntent | None = None
    end: CallEnd | None = None
    status: int | None = None
    refusal: bytes = b""  # the body of an answer that is an error
    stop_string: str | None = None
    has_left: bool = False
    is_cut_off: bool = False

    def leave(self, *, is_cut_off: bool = False) -> None:
        """The agent has left (or the proxy ends: `is_cut_off`): the engine is told at once."""
        self.has_left, self.is_cut_off = True, is_cut_off
        if self.client is not None:
            self.client.leave()

    @property
    def stream_error(self) -> str | None:
        """What the engine said inside a stream that it then ended properly."""
        is_whole = self.client is not None and self.client.is_complete
        return self.end.error if is_whole and self.end is not None else None

    def see(self, message: Message) -> None:
        """A message of the inner answer, on its way to the translator."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body: bytes = message.get("body", b"")
        if (self.status or 0) >= 400:
            self.refusal += body
        elif b'"stop_reason":"' in body and (match := _STOP_STRING.search(body)):
            self.stop_string = orjson.loads(match.group(1))


class _OuterRecorder:
    """What the inner exchange says of its call, as it is true of the agent's."""

    def __init__(self, recorder: CallRecorder, call: OuterCall) -> None:
        self._recorder = recorder
        self._call = call

    @property
    def refusal(self) -> str | None:
        return self._recorder.refusal

    def put(self, entry: LogEntry) -> None:
        if isinstance(entry, CallDelivered):
            return  # to the translator; what the agent received the front knows
        self._recorder.put(self._seen(entry) if isinstance(entry, CallEnd) else entry)

    async def committed(self, entry: CallEnd) -> None:
        await self._recorder.committed(self._seen(entry))

    def _seen(self, end: CallEnd) -> CallEnd:
        end = replace(end, upstream_id=self._call.answer_id)
        if end.status is CallStatus.DISCONNECTED:  # the exchange's client is the translator
            if self._call.is_cut_off:
                end = replace(end, status=CallStatus.ABORTED, error=STOPPED)
            elif not self._call.has_left:
                end = replace(end, status=CallStatus.ERROR, error="the translator broke off")
        reason = _untrainable(self._call.rendered, end)
        if reason is not None:
            kept = tuple(replace(choice, quarantine=choice.quarantine or reason) for choice in end.choices)
            end = replace(end, choices=kept)
        self._call.end = end
        return end


def _untrainable(rendered: Rendered, end: CallEnd) -> Quarantine | None:
    if rendered.prompt_ids is None or end.prompt_ids != token_ids(rendered.prompt_ids):
        return Quarantine.PROMPT_PARITY
    return Quarantine.CONSTRAINED if rendered.is_constrained else None


class Hop:
    """ASGI application of the inner listener."""

    def __init__(self, parts: Parts, max_body_bytes: int) -> None:
        self._parts = parts
        self._max_body_bytes = max_body_bytes
        self._calls: dict[str, OuterCall] = {}
        self._server = InnerServer(self, timeout_keep_alive=KEEP_ALIVE_SEC)

    def url(self) -> str:
        """Where LiteLLM is to send its chat request; starts the listener."""
        return self._server.url() + "/v1"

    async def stop(self) -> None:
        await self._server.stop()

    def open(self, call: OuterCall) -> str:
        """A token for one inner request."""
        token = secrets.token_hex(32)
        self._calls[token] = call
        return token

    def close(self, token: str) -> None:
        self._calls.pop(token, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        token = keys[0].decode("latin-1").removeprefix("Bearer ") if keys else ""
        call = self._calls.pop(token, None) if scope["path"] == CHAT.path else None
        if call is None:
            await Client(receive, send, 0).refuse(401, "no call is waiting for this request")
            return

        async def seen(message: Message) -> None:
            call.see(message)
            await send(message)

        client = Client(receive, seen, self._max_body_bytes)
        try:
            translated = orjson.loads(await client.body())
        except (BodyTooLargeError, ClientGoneError, orjson.JSONDecodeError):
            await client.refuse(400, "not a chat request")
            return
        if call.has_left:  # and was recorded as such
            await client.refuse(401, "no call is waiting for this request")
            return
        call.client = client
        client.watch()
        try:
            await self._exchange(call, client, translated)
        finally:
            client.close()

    async def _exchange(self, call: OuterCall, client: Client, translated: dict[str, Any]) -> None:
        outer = call.request
        assert outer.doc is not None
        body = chat_body(outer.dialect, outer.doc, translated, call.rendered.prompt_ids)
        request = read_request("chat", body)
        if request.unrecordable == _SINGLE_CALL_STREAM:
            request = replace(request, unrecordable=None)
        recorded = replace(
            outer, sampling=request.sampling, unrecordable=request.unrecordable or call.rendered.fault
        )
        call.intent = make_intent(self._parts, call.incoming, recorded, call.attribution, call.lease)
        parts = replace(self._parts, recorder=_OuterRecorder(self._parts.recorder, call))
        headers = render_headers(call.incoming.headers)
        incoming = Incoming(CHAT, call.incoming.address, headers, CHAT.path)
        await Exchange(parts, client, request, call.lease, call.intent).run(incoming)
