"""One recorded call, from the agent's request to the last byte of its answer.

Owns the order of things: intent queued, engine asked, bytes passed on as they come, the answer's end held
until its rows are committed, the client's leaving passed to the engine at once. What is added and taken back
is inject.py's, what a row says capture.py's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..errors import EngineError, StoreError, UserError
from ..records import Attribution, CallDelivered, CallEnd, CallIntent, CallMoved, CallStatus, now_ms
from .asking import Asking, give_engine
from .attribution.address import attribute, of_evaluation, without_episode
from .incoming import Incoming, Parts, make_intent
from .live.engines import EngineState
from .live.served import Lease, UnservedVersionError
from .messages.capture import MAX_ERROR_CHARS, Answer, Ending, StreamReader, error_text, make_end
from .messages.inject import Injection, inject
from .messages.plain_chunks import PlainChunks
from .messages.request import Request, read_request
from .messages.sse import Framer, data_of
from .messages.whole_answers import no_pause, read_answer, short_pause, unpacked
from .transport.client import TOO_LARGE, BodyTooLargeError, Client, ClientGoneError
from .transport.upstream import FAILURES, EngineAnswer, response_headers

LEFT = "the client left before the answer was complete"
STOPPED = "the proxy was stopped"
LARGE_ANSWER_BYTES = 256 * 1024
"""Whole answers above this are read in a thread, so that they do not stall other calls."""
MANY_CHUNKS = 2048
"""So many of a stream are read at once, not all of them at its end: that would stall other calls."""

logger = logging.getLogger("lightning.relay")


async def serve_call(parts: Parts, client: Client, incoming: Incoming) -> None:
    """Read the request, find what serves it, and carry it out."""
    try:
        body = await client.body()
    except BodyTooLargeError:
        await client.refuse(413, TOO_LARGE)
        return
    except ClientGoneError:
        return
    dialect = incoming.route.dialect or "other"
    request = read_request(dialect, body, incoming.header(b"content-type") or "")
    attribution = attribute(incoming.address, request.doc)
    if parts.evaluation_episode is not None:
        attribution = of_evaluation(attribution, parts.evaluation_episode)
    if attribution.episode_id is None and parts.inference is not None:
        conversation = request.doc if dialect == "chat" else None  # what is learned is learned of chats
        attribution = parts.inference.infer(attribution, incoming.headers, conversation)
    if attribution.episode_id is None:
        try:
            attribution = without_episode(incoming.address, attribution)
        except UserError as error:
            await client.refuse(400, str(error))
            return
    refusal = parts.recorder.refusal
    if refusal is not None:
        await client.refuse(503, f"the call can't be recorded: {refusal}", retry_after_sec=1)
        return
    client.watch()
    if parts.front is not None and parts.front.takes(request):
        await parts.front.serve(client, incoming, request, attribution)
    else:
        await carry_out(parts, client, incoming, request, attribution)


async def carry_out(
    parts: Parts, client: Client, incoming: Incoming, request: Request, attribution: Attribution
) -> None:
    """Ask the engine as the agent did. The client is being watched."""
    lease = await admit(parts, client, request, attribution)
    if lease is None:
        return
    try:
        intent = make_intent(parts, incoming, request, attribution, lease)
        await Exchange(parts, client, request, lease, intent).run(incoming)
    finally:
        lease.release()


async def admit(parts: Parts, client: Client, request: Request, attribution: Attribution) -> Lease | None:
    """What serves the call; None: the client has its answer already, or has left."""
    try:
        lease = await parts.live.admit(request.model, attribution.episode_id, attribution.agent)
        try:
            give_engine(parts.engines, lease, request.model, attribution.episode_id)
        except EngineError:
            lease.release()
            raise
        return lease
    except UnservedVersionError as error:
        await client.refuse(404, str(error))
    except EngineError as error:
        await client.refuse(503, str(error), retry_after_sec=1)
    except asyncio.CancelledError:
        if not client.was_interrupted():
            raise
        # It left at the closed gate: the engine never heard of it.
    return None


class Exchange:
    """The engine's answer on its way to the client."""

    __slots__ = (
        "_client",
        "_ended_at_ms",
        "_first_byte_at_ms",
        "_http_status",
        "_injection",
        "_intent",
        "_is_queued",
        "_lease",
        "_parts",
        "_request",
        "_version_end",
    )

    def __init__(
        self, parts: Parts, client: Client, request: Request, lease: Lease, intent: CallIntent
    ) -> None:
        self._parts = parts
        self._client = client
        self._request = request
        self._lease = lease
        self._intent = intent
        self._injection: Injection = inject(request, lease.served.model, parts.live.base_model)
        self._http_status: int | None = None
        self._first_byte_at_ms: int | None = None
        self._is_queued = False  # the row of the answer's end is the recorder's
        self._ended_at_ms = 0
        self._version_end: int | None = None

    @property
    def _engine_url(self) -> str:
        engine = self._lease.engine
        return self._intent.engine_url if engine is None else engine.url

    async def run(self, incoming: Incoming) -> None:
        self._parts.recorder.put(self._intent)
        reader = StreamReader(self._request.num_choices)
        try:
            await self._ask(incoming, reader)
        except asyncio.CancelledError:
            gone = self._client.was_interrupted()
            status = CallStatus.DISCONNECTED if gone else CallStatus.ABORTED
            note = LEFT if gone else STOPPED
            if not self._is_queued:
                self._engine_ended()
                self._parts.recorder.put(self._end(reader.parse(), status, note))
            self._delivered()
            if not gone:
                raise

    async def _ask(self, incoming: Incoming, reader: StreamReader) -> None:
        try:
            answer = await self._send(incoming)
        except FAILURES as error:
            await self._refuse_unreachable(error)
            return
        try:
            self._http_status = answer.status
            self._first_byte_at_ms = now_ms()
            if answer.content_type == "text/event-stream" and answer.content_encoding is None:
                await self._pass_stream(answer, reader)
            else:
                await self._pass_whole(answer)
        finally:
            answer.close()  # not whole: the engine stops generating at once

    async def _send(self, incoming: Incoming) -> EngineAnswer:
        parts, intent = self._parts, self._intent

        def moved(engine: EngineState) -> None:
            parts.recorder.put(CallMoved(intent.id, engine.url, engine.fingerprint_id))

        asking = Asking(
            parts.engines,
            parts.upstream,
            self._lease,
            self._request.model,
            intent.attribution.episode_id,
            moved=moved,
        )
        return await asking.post(
            incoming.path_and_query,
            incoming.headers,
            self._injection.body,
            wants_plain=not self._injection.is_nothing,
        )

    async def _refuse_unreachable(self, error: BaseException) -> None:
        engine = self._engine_url
        reason = f"the engine at {engine} is not reachable: {error or type(error).__name__}"
        self._engine_ended()
        end = self._end(Answer(), CallStatus.ERROR, reason)
        if await self._record(end):
            await self._client.refuse(502, reason, retry_after_sec=1)
            self._delivered()

    # --- whole answers ---

    async def _pass_whole(self, answer: EngineAnswer) -> None:
        received: list[bytes] = []
        try:
            async for data in answer:
                received.append(data)
        except FAILURES as error:
            self._suspect()
            await self._break_whole(answer, b"".join(received), error)
            return
        self._engine_ended()
        if sum(map(len, received)) > LARGE_ANSWER_BYTES:
            self._client.shield()  # the answer is whole: it is recorded, whoever leaves meanwhile
            async with self._parts.long_answers:
                end, visible, is_plain = await asyncio.to_thread(self._read_long, answer, received)
        else:
            end, visible, is_plain = self._read_whole(answer, b"".join(received))
        headers = response_headers(answer, len(visible))
        if is_plain:
            headers = [pair for pair in headers if pair[0] != b"content-encoding"]
        if await self._record(end):
            await self._client.start(answer.status, headers)
            await self._client.write_long(visible)
            self._delivered()

    def _read_long(self, answer: EngineAnswer, received: list[bytes]) -> tuple[CallEnd, bytes, bool]:
        """In a thread, and with pauses: as `_read_whole`."""
        body = b"".join(received)
        received.clear()
        return self._read_whole(answer, body, short_pause)

    def _read_whole(
        self, answer: EngineAnswer, body: bytes, pause: Callable[[], None] = no_pause
    ) -> tuple[CallEnd, bytes, bool]:
        """The row, the bytes for the client, and whether they had to be unpacked for that."""
        encoding = answer.content_encoding
        text = body if encoding is None else unpacked(body, encoding)
        found = Answer()
        known = read_answer(text, pause)
        doc = known.doc
        if not isinstance(doc, dict):
            note = None if answer.status < 400 else body[:MAX_ERROR_CHARS].decode("utf-8", "replace")
            return self._end(found, None, note), body, False
        if answer.status >= 400:
            return self._end(found, None, error_text(doc) or str(doc)[:MAX_ERROR_CHARS]), body, False
        found.take(doc, is_chunk=False)
        end = self._end(found, None, None)
        if self._injection.is_nothing:
            return end, body, False
        return end, known.edited(self._injection.json_edits(known.short, doc)), encoding is not None

    async def _break_whole(self, answer: EngineAnswer, received: bytes, error: BaseException) -> None:
        """The engine went away in the middle: so does the answer, at the same byte if nothing was added."""
        self._engine_ended()
        note = f"the engine's answer broke off: {error or type(error).__name__}"
        end = self._end(Answer(), CallStatus.ERROR, note)
        if await self._record(end):
            await self._client.start(answer.status, response_headers(answer))
            if received and (self._injection.is_nothing or answer.status >= 400):
                await self._client.write(received)
            self._delivered()

    # --- streams ---

    async def _pass_stream(self, answer: EngineAnswer, reader: StreamReader) -> None:
        headers = response_headers(answer)
        if not self._injection.is_nothing:
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        await self._client.start(answer.status, headers)
        framer = Framer()
        reader.plain = PlainChunks(self._injection.undo_block)
        held: list[bytes] = []
        fault: BaseException | None = None
        try:
            async for data in answer:
                ready = self._take_events(framer.feed(data), reader, held)
                if ready:
                    await self._client.write(ready)
        except FAILURES as error:
            self._suspect()
            fault = error
        self._engine_ended()
        held.append(self._injection.undo_rest(framer.rest()))
        note = None if fault is None else f"the engine's stream broke off: {fault or type(fault).__name__}"
        end = self._end(reader.parse(), None if fault is None else CallStatus.ERROR, note)
        if not await self._record(end):
            return
        tail = b"".join(held)
        if fault is None:
            await self._client.write(tail, is_last=True)
        elif tail:
            await self._client.write(tail)  # and no clean end: the server closes the connection
        self._delivered()

    def _take_events(self, blocks: list[bytes], reader: StreamReader, held: list[bytes]) -> bytes:
        """Read what came; the bytes that may go on now. From the answer's end on, they are held."""
        ready: list[bytes] = []
        undo = self._injection.undo_block
        holds = self._parts.holds_ends
        plain = reader.plain
        for block in blocks:
            seen = None if plain is None or reader.has_ended else plain.take(block)
            if seen is None:
                data = data_of(block)
                if data is not None:
                    reader.add(data)
                seen = undo(block)
            (held if holds and reader.has_ended else ready).append(seen)
        if plain is not None and len(plain.ids) >= MANY_CHUNKS:
            reader.parse()
        return ready[0] if len(ready) == 1 else b"".join(ready)

    # --- the row ---

    def _suspect(self) -> None:
        if self._lease.engine is not None:
            self._lease.engine.is_suspect = True  # it may have ended: somebody looks at once

    def _engine_ended(self) -> None:
        """The engine has ended this answer, one way or the other: the next version may come."""
        self._ended_at_ms = now_ms()
        self._version_end = self._lease.version_now()
        self._lease.release()

    def _end(self, answer: Answer, status: CallStatus | None, error: str | None) -> CallEnd:
        served = self._lease.served
        ending = Ending(
            http_status=self._http_status,
            policy=served.policy,
            version_start=served.version,
            version_end=self._version_end,
            first_byte_at_ms=self._first_byte_at_ms,
            ended_at_ms=self._ended_at_ms,
            status=status,
            error=error,
        )
        return make_end(self._intent.id, self._request, answer, ending)

    async def _record(self, end: CallEnd) -> bool:
        """Hand the row over; with durability "commit", wait for it. False: nothing more may be delivered."""
        self._is_queued = True
        if self._parts.inference is not None:
            self._parts.inference.learn(self._intent.attribution.episode_id, self._request.doc, end)
        if not self._parts.holds_ends:
            self._parts.recorder.put(end)
            return True
        try:
            await self._parts.recorder.committed(end)
        except StoreError as error:
            logger.error("the end of call %s is withheld: %s", self._intent.id, error)
            if not self._client.has_started and not self._client.gone:
                await self._client.refuse(503, f"the call can't be recorded: {error}", retry_after_sec=1)
            return False
        except asyncio.CancelledError:
            # The row is queued all the same; only the news that the client left is to be added.
            if not self._client.was_interrupted():
                raise
            self._delivered()
            return False
        return True

    def _delivered(self) -> None:
        self._parts.recorder.put(CallDelivered(self._intent.id, self._client.is_complete))
