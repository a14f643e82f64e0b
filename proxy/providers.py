"""Calls to other vendors' models (judges, teachers, baselines), through LiteLLM's Router in the translator.

Owns which names are vendors' and the rows of their calls: recorded as text, never trainable, the answer's end
held like any other. Keys stay in the environment: none is stored, logged or sent to the agent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import aiohttp

from ..errors import StoreError
from ..records import (
    Attribution,
    CallDelivered,
    CallEnd,
    CallIntent,
    CallKind,
    CallStatus,
    Quarantine,
    RecordedChoice,
    new_id,
    now_ms,
)
from ..settings.proxy import ProviderSettings
from .dialects.errors import refuse
from .dialects.translator import MISSING_FOR_VENDORS, Translator, TranslatorError, is_installed
from .dialects.wire import ANSWER_ID, SHOWN_MODEL, USAGE_EVENT, Summary, Vendor
from .exchange import LEFT, STOPPED
from .incoming import CallFront, Incoming, Parts, intent_of
from .messages.capture import MAX_ERROR_CHARS, Ending, StreamReader, make_end
from .messages.request import Request
from .messages.splice import parse
from .messages.sse import Framer, data_of
from .transport.client import Client
from .transport.upstream import FAILURES

_ID_PREFIX = {"chat": "chatcmpl-", "messages": "msg_", "responses": "resp_"}

logger = logging.getLogger("lightning.providers")


def vendors(providers: Mapping[str, ProviderSettings]) -> tuple[Vendor, ...]:
    """What the translator is told of them."""
    return tuple(
        Vendor(name, p.model, p.api_base, p.api_key_env, p.num_retries, p.timeout_sec)
        for name, p in providers.items()
    )


class ProviderFront:
    """Answers calls whose model is a vendor's; all others are `others`' business."""

    def __init__(
        self,
        parts: Parts,
        translator: Translator,
        providers: Mapping[str, ProviderSettings],
        others: CallFront,
    ) -> None:
        self._parts = parts
        self._translator = translator
        self._providers = providers
        self._others = others

    def takes(self, request: Request) -> bool:
        return request.model in self._providers or self._others.takes(request)

    async def serve(
        self, client: Client, incoming: Incoming, request: Request, attribution: Attribution
    ) -> None:
        provider = None if request.model is None else self._providers.get(request.model)
        if provider is None:
            await self._others.serve(client, incoming, request, attribution)
            return
        variable = provider.api_key_env
        if request.dialect not in _ID_PREFIX:
            reason = (
                f"{request.model!r} is another vendor's: ask it for chat completions, responses or messages"
            )
            await refuse(client, request.dialect, 400, reason)
        elif not is_installed():
            await refuse(client, request.dialect, 501, MISSING_FOR_VENDORS)
        elif variable is not None and not os.environ.get(variable):
            reason = f"provider {request.model!r}: the proxy's environment has no variable {variable}"
            await refuse(client, request.dialect, 501, reason)
        else:
            intent = intent_of(
                self._parts,
                incoming,
                request,
                attribution,
                kind=CallKind(provider.kind),
                served_model=provider.model,
                engine_url=provider.api_base or provider.model.partition("/")[0],
                unrecordable="another vendor's model",
            )
            await _VendorCall(self._parts, self._translator, client, request, intent).run()


class _VendorCall:
    """One call, from its intent to the last byte of its answer."""

    def __init__(
        self, parts: Parts, translator: Translator, client: Client, request: Request, intent: CallIntent
    ) -> None:
        self._parts = parts
        self._translator = translator
        self._client = client
        self._request = replace(request, unrecordable=None, quarantine=None)
        self._intent = intent
        self._answer_id = _ID_PREFIX[request.dialect] + new_id()
        self._reader = StreamReader(request.num_choices)
        self._status: int | None = None
        self._first_byte_at_ms: int | None = None
        self._summary: Summary | None = None
        self._is_queued = False

    async def run(self) -> None:
        self._parts.recorder.put(self._intent)
        try:
            await self._ask()
        except asyncio.CancelledError:
            gone = self._client.was_interrupted()
            if not self._is_queued:
                status = CallStatus.DISCONNECTED if gone else CallStatus.ABORTED
                self._parts.recorder.put(self._end(status, LEFT if gone else STOPPED))
            if not gone:
                raise
        finally:
            self._parts.recorder.put(CallDelivered(self._intent.id, self._client.is_complete))

    async def _ask(self) -> None:
        shown = json.dumps(self._request.model)
        headers = {ANSWER_ID: self._answer_id, SHOWN_MODEL: shown}
        path = f"/vendor/{self._request.dialect}"
        try:
            answer = await self._translator.send(path, headers, self._request.body)
        except (TranslatorError, *FAILURES) as error:
            await self._fail(503, f"the translator can't be had: {error or type(error).__name__}")
            return
        self._status = answer.status
        self._first_byte_at_ms = now_ms()
        try:
            if answer.content_type == "text/event-stream":
                await self._pass_stream(answer)
            else:
                await self._pass_whole(answer)
        finally:
            answer.close()

    async def _pass_whole(self, answer: aiohttp.ClientResponse) -> None:
        try:
            body = await answer.read()
        except FAILURES as error:
            await self._fail(502, f"the translator broke off: {error or type(error).__name__}")
            return
        doc = parse(body)
        if not isinstance(doc, dict):
            await self._fail(502, "the translator failed; the proxy's log on stderr says why")
            return
        if answer.status >= 400:
            await self._fail(answer.status, str(doc.get("message")))
            return
        self._summary, doc = Summary(**doc["summary"]), doc["answer"]
        self._reader.answer.take(doc, is_chunk=False)
        if await self._record(self._end(None, None)):
            await self._client.send_json(200, doc)

    async def _pass_stream(self, answer: aiohttp.ClientResponse) -> None:
        await self._client.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        framer, held = Framer(), list[bytes]()
        fault: str | None = None
        try:
            async for data in answer.content.iter_any():
                ready = b"".join(self._passing(block, held) for block in framer.feed(data))
                if ready:
                    await self._client.write(ready)
        except FAILURES as error:
            fault = f"the vendor's stream broke off: {error or type(error).__name__}"
        end = self._end(None if fault is None else CallStatus.ERROR, fault)
        if await self._record(end) and fault is None:
            await self._client.write(b"".join(held), is_last=True)

    def _passing(self, block: bytes, held: list[bytes]) -> bytes:
        """What may go on now of this block. From the answer's end on, everything is held."""
        if block.startswith(USAGE_EVENT):
            self._summary = Summary.read(block[len(USAGE_EVENT) :].strip())
            return b""
        data = data_of(block)
        if data is not None:
            self._reader.add(data)
        if self._parts.holds_ends and self._reader.has_ended:
            held.append(block)
            return b""
        return block

    async def _fail(self, status: int, message: str) -> None:
        self._status = status
        if await self._record(self._end(CallStatus.ERROR, message[:MAX_ERROR_CHARS])):
            await refuse(self._client, self._request.dialect, status, message)

    def _end(self, status: CallStatus | None, error: str | None) -> CallEnd:
        ending = Ending(self._status, None, None, None, self._first_byte_at_ms, now_ms(), status, error)
        end = make_end(self._intent.id, self._request, self._reader.parse(), ending)
        said = self._summary
        choices = end.choices
        if said is not None and said.message is not None:
            said_choice = RecordedChoice(0, None, None, said.finish_reason, None, said.message, None)
            choices = (said_choice,)
        return replace(
            end,
            upstream_id=self._answer_id,
            choices=tuple(replace(choice, quarantine=Quarantine.NOT_POLICY) for choice in choices),
            reported_prompt_tokens=None if said is None else said.prompt_tokens,
            reported_completion_tokens=None if said is None else said.completion_tokens,
            usage_estimated=None if said is None else said.is_estimated,
        )

    async def _record(self, end: CallEnd) -> bool:
        """Hand the row over; with durability "commit", wait for it. False: nothing more may be delivered."""
        self._is_queued = True
        if not self._parts.holds_ends:
            self._parts.recorder.put(end)
            return True
        try:
            await self._parts.recorder.committed(end)
        except StoreError as error:
            logger.error("the end of call %s is withheld: %s", self._intent.id, error)
            if not self._client.has_started:
                await refuse(self._client, self._request.dialect, 503, f"the call can't be recorded: {error}")
            return False
        return True
