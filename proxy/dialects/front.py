"""A Responses or Messages call, from the agent's request to the last byte of its answer.

Owns the order of things: rendered by the engine, translated by LiteLLM, carried out by the inner hop, passed
on as it comes. One row per call, written by the hop; what the agent received is added here. The answer's end
is known to LiteLLM only when the hop has committed its rows, so it can't be delivered earlier.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import aiohttp
import orjson

from ...records import Attribution, CallDelivered, CallEnd, CallStatus, new_id, now_ms
from ..asking import Asking
from ..exchange import LEFT, STOPPED, Exchange, admit, carry_out
from ..incoming import Incoming, Parts, make_intent
from ..live.served import Lease
from ..messages.capture import MAX_ERROR_CHARS
from ..messages.request import Request
from ..messages.sse import Framer, data_of
from ..transport.client import Client
from ..transport.upstream import FAILURES
from .errors import error_event, refuse
from .hop import Hop, OuterCall
from .rendering import Refused, Rendered, read_rendering, render_headers, render_request
from .translatable import DIALECTS, untranslatable
from .translator import MISSING, Translator, TranslatorError, is_installed
from .wire import ANSWER_ID, FAULT_STATUS, HOP_URL, SHOWN_MODEL, TOKEN

_ID_PREFIX = {"messages": "msg_", "responses": "resp_"}

logger = logging.getLogger("lightning.dialects")


class DialectFront:
    """Answers the calls of the two translated dialects."""

    def __init__(self, parts: Parts, translator: Translator, hop: Hop, *, translates: bool) -> None:
        self.parts = parts
        self.translator = translator
        self.hop = hop
        self._translates = translates

    def takes(self, request: Request) -> bool:
        return self._translates and request.dialect in DIALECTS

    async def serve(
        self, client: Client, incoming: Incoming, request: Request, attribution: Attribution
    ) -> None:
        reason = request.unrecordable if request.doc is None else untranslatable(request.dialect, request.doc)
        if reason is not None:
            await carry_out(self.parts, client, incoming, replace(request, unrecordable=reason), attribution)
            return
        if not is_installed():
            await refuse(client, request.dialect, 501, MISSING)
            return
        lease = await admit(self.parts, client, request, attribution)
        if lease is None:
            return
        call = _Translation(self, client, incoming, request, lease)
        try:
            await call.run(attribution)
        finally:
            lease.release()


class _Translation:
    """One call on its way through render, translator and hop."""

    def __init__(
        self, front: DialectFront, client: Client, incoming: Incoming, request: Request, lease: Lease
    ) -> None:
        self._parts = front.parts
        self._translator = front.translator
        self._hop = front.hop
        self._client = client
        self._incoming = incoming
        self._request = request
        self._lease = lease
        self._dialect = request.dialect
        self._call: OuterCall | None = None

    async def run(self, attribution: Attribution) -> None:
        try:
            rendered = await self._render(attribution)
            if isinstance(rendered, Refused):
                await self._fail(attribution, rendered.status, rendered.message, rendered.kind)
                return
            call = self._call = OuterCall(
                self._incoming,
                self._request,
                attribution,
                self._lease,
                rendered,
                _ID_PREFIX[self._dialect] + new_id(),
            )
            await self._translate(call)
        except FAILURES as error:
            assert self._lease.engine is not None, "admitted calls have an engine"
            engine = self._lease.engine.url
            reason = f"the engine at {engine} is not reachable: {error or type(error).__name__}"
            await self._fail(attribution, 502, reason)
        except asyncio.CancelledError:
            gone = self._client.was_interrupted()
            if self._call is not None:
                self._call.leave(is_cut_off=not gone)
            status = CallStatus.DISCONNECTED if gone else CallStatus.ABORTED
            self._note_failure(attribution, status, None, LEFT if gone else STOPPED)
            if not gone:
                raise
        finally:
            if self._call is not None and self._call.intent is not None:
                self._parts.recorder.put(CallDelivered(self._call.intent.id, self._client.is_complete))

    async def _render(self, attribution: Attribution) -> Rendered | Refused:
        request = self._request
        assert request.doc is not None
        parts, lease = self._parts, self._lease
        asking = Asking(parts.engines, parts.upstream, lease, request.model, attribution.episode_id)
        answer = await asking.post(
            f"{self._incoming.route.path}/render",
            render_headers(self._incoming.headers),
            render_request(request.body, request.doc, self._lease.served.model),
            wants_plain=True,
        )
        return read_rendering(answer.status, await answer.read())

    async def _translate(self, call: OuterCall) -> None:
        token = self._hop.open(call)
        headers = {HOP_URL: self._hop.url(), TOKEN: token, ANSWER_ID: call.answer_id}
        shown = self._request.model or self._parts.live.base_model
        if shown is not None:
            headers[SHOWN_MODEL] = json.dumps(shown)  # ASCII, as headers are
        try:
            answer = await self._translator.send(f"/{self._dialect}", headers, self._request.body)
        except TranslatorError as error:
            await self._fail(call.attribution, 503, str(error))
            return
        except FAILURES as error:
            await self._fail(
                call.attribution, 502, f"the translator broke off: {error or type(error).__name__}"
            )
            return
        finally:
            self._hop.close(token)
        try:
            if answer.content_type == "text/event-stream":
                await self._pass_stream(call, answer)
            else:
                await self._pass_whole(call, answer)
        finally:
            answer.close()

    # --- answers ---

    async def _pass_whole(self, call: OuterCall, answer: aiohttp.ClientResponse) -> None:
        try:
            body = await answer.read()
        except FAILURES as error:
            await self._fail(
                call.attribution, 502, f"the translator broke off: {error or type(error).__name__}"
            )
            return
        if (call.status or 0) >= 400:
            await self._pass_refusal(call)
        elif answer.status == FAULT_STATUS and call.intent is None:
            logger.warning("a %s call goes to the engine as it is: %s", self._dialect, _message(body))
            await self._pass_untranslated(call.attribution)
        elif answer.status == FAULT_STATUS:
            await self._fail(call.attribution, 502, f"LiteLLM could not translate it: {_message(body)}")
        else:
            doc = orjson.loads(body)
            if self._dialect == "messages":
                _set_stop_string(doc, call.stop_string)
            await self._client.send_json(answer.status, doc)

    async def _pass_untranslated(self, attribution: Attribution) -> None:
        """The engine can answer what LiteLLM does not understand, if not token by token."""
        request = replace(self._request, unrecordable="LiteLLM could not translate it")
        intent = make_intent(self._parts, self._incoming, request, attribution, self._lease)
        assert self._call is not None, "it was handed to the translator"
        self._call.intent = intent
        await Exchange(self._parts, self._client, request, self._lease, intent).run(self._incoming)

    async def _pass_refusal(self, call: OuterCall) -> None:
        """What the engine refused, in its own words and the dialect's shape."""
        assert call.status is not None
        try:
            error = orjson.loads(call.refusal)["error"]
            message, kind = str(error["message"]), error.get("type")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            message, kind = call.refusal[:MAX_ERROR_CHARS].decode("utf-8", "replace"), None
        await refuse(self._client, self._dialect, call.status, message, kind)

    async def _pass_stream(self, call: OuterCall, answer: aiohttp.ClientResponse) -> None:
        await self._client.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        framer = Framer()
        try:
            async for data in answer.content.iter_any():
                ready = b"".join(self._seen(call, block) for block in framer.feed(data))
                if ready:
                    await self._client.write(ready)
        except FAILURES as error:
            if call.stream_error is None:
                logger.warning("the answer %s broke off: %s", call.answer_id, error)
                return  # without a clean end, as the engine's own
            await self._client.write(error_event(self._dialect, call.stream_error), is_last=True)
            return
        await self._client.write(framer.rest(), is_last=True)

    def _seen(self, call: OuterCall, block: bytes) -> bytes:
        if call.stop_string is None or b'"message_delta"' not in block:
            return block
        doc = orjson.loads(data_of(block) or b"{}")
        if doc.get("type") != "message_delta":
            return block
        _set_stop_string(doc["delta"], call.stop_string)
        return b"event: message_delta\ndata: " + orjson.dumps(doc) + b"\n\n"

    # --- what went wrong before the engine generated anything ---

    async def _fail(
        self, attribution: Attribution, status: int, message: str, kind: str | None = None
    ) -> None:
        """Record the failure, if the hop has not, and tell the client."""
        self._note_failure(attribution, CallStatus.ERROR, status, message)
        if self._client.has_started:
            return
        await refuse(self._client, self._dialect, status, message, kind)

    def _note_failure(
        self, attribution: Attribution, status: CallStatus, http_status: int | None, message: str
    ) -> None:
        """The row of a call that the hop has not seen; the hop writes those that it has."""
        if self._call is not None and self._call.intent is not None:
            return
        parts = self._parts
        intent = make_intent(parts, self._incoming, self._request, attribution, self._lease)
        parts.recorder.put(intent)
        parts.recorder.put(
            CallEnd(
                call_id=intent.id,
                status=status,
                http_status=http_status,
                upstream_id=None,
                prompt_ids=None,
                choices=(),
                policy_version_end=intent.policy_version,
                reported_completion_tokens=None,
                error=message[:MAX_ERROR_CHARS],
                first_byte_at_ms=None,
                ended_at_ms=now_ms(),
            )
        )


def _set_stop_string(doc: dict[str, object], stop_string: str | None) -> None:
    """LiteLLM does not say that it was a stop string that ended the answer, and which."""
    if stop_string is not None and doc.get("stop_reason") == "end_turn":
        doc["stop_reason"], doc["stop_sequence"] = "stop_sequence", stop_string


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARS].decode("utf-8", "replace")
