"""From the engine's answer to the row: prompt ids, and per choice ids, logprobs, finish reason and message.

Pure. Reads what the engine sent (before anything is hidden from the agent) and judges each choice by what a
trainable row must prove. Knows nothing of transport; the relay says how the answer ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from ...records import (
    HIGHEST_LOGPROB,
    MISSING_LOGPROB,
    CallEnd,
    CallStatus,
    Logprobs,
    Quarantine,
    RecordedChoice,
    TokenIds,
    logprobs,
    token_ids,
)
from .assemble import MessageParts
from .plain_chunks import PlainChunks
from .request import Request
from .splice import parse
from .whole_answers import Tokens

MAX_ERROR_CHARS = 1000
_PARSE_EVERY_BYTES = 32 * 1024
_FINISHES = re.compile(rb'"finish_reason"\s*:\s*"')
_TERMINAL_EVENT = re.compile(rb'"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|failed))"')
"""How streams of the Messages and Responses APIs end. In a chat stream no key `type` has such a value."""


@dataclass(slots=True)
class _ChoiceParts:
    """One choice while it comes in. `ids` and `logprobs` None: the engine gave none (so far)."""

    index: int
    ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    message: Mapping[str, Any] | None = None
    parts: MessageParts = field(default_factory=MessageParts)
    usage_tokens: int | None = None  # as of the last chunk of this choice that said


@dataclass(slots=True)
class Answer:
    """What the engine said, in one piece or in many."""

    upstream_id: str | None = None
    model: str | None = None
    prompt_ids: list[int] | None = None
    choices: dict[int, _ChoiceParts] = field(default_factory=dict)
    usage_tokens: int | None = None
    error: str | None = None
    is_damaged: bool = False  # a chunk could not be read: ids may be missing in the middle

    def is_finished(self, num_choices: int) -> bool:
        """Every choice has a finish reason that is not an abort."""
        return len(self.choices) >= num_choices and all(
            choice.finish_reason not in (None, "abort") for choice in self.choices.values()
        )

    def take(self, doc: Mapping[str, Any], *, is_chunk: bool) -> None:
        """Add a whole answer, or one chunk of a stream."""
        try:
            self._take(doc, is_chunk)
        except (AttributeError, TypeError):  # not the shape of an answer: it passes, nothing is made of it
            self.is_damaged = True

    def _take(self, doc: Mapping[str, Any], is_chunk: bool) -> None:
        if self.upstream_id is None and isinstance(doc.get("id"), str):
            self.upstream_id = doc["id"]
        if self.model is None and isinstance(doc.get("model"), str):
            self.model = doc["model"]
        if doc.get("error"):
            self.error = error_text(doc)
        if self.prompt_ids is None:
            self.prompt_ids = doc.get("prompt_token_ids")
        choices = doc.get("choices")
        usage = doc.get("usage")
        reported = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(reported, int):
            reported = None
        if choices:
            for choice in choices:
                self._take_choice(choice, reported)
        # A chunk's usage counts its own choice so far; a whole answer's, or the last chunk's, everything.
        if reported is not None and not (is_chunk and choices):
            self.usage_tokens = reported

    def _take_choice(self, choice: Mapping[str, Any], reported: int | None) -> None:
        index = choice.get("index") or 0
        if not isinstance(index, int):
            raise TypeError("index")
        parts = self.choices.get(index)
        if parts is None:
            parts = self.choices[index] = _ChoiceParts(index)
        if self.prompt_ids is None:
            self.prompt_ids = choice.get("prompt_token_ids")
        ids = choice.get("token_ids")
        if ids is not None:
            parts.ids = ids if parts.ids is None else parts.ids + ids
        given = choice.get("logprobs")
        if given:
            values = _logprob_values(given)
            parts.logprobs = values if parts.logprobs is None else parts.logprobs + values
        if choice.get("finish_reason") is not None:
            parts.finish_reason = str(choice["finish_reason"])
            parts.stop_reason = choice.get("stop_reason")
        if "message" in choice:
            parts.message = choice["message"]
        elif "delta" in choice:
            parts.parts.add(choice["delta"] or {})
        elif isinstance(choice.get("text"), str):
            parts.parts.add({"content": choice["text"]})
        if reported is not None:
            parts.usage_tokens = reported

    def take_plain(self, chunks: PlainChunks) -> None:
        """Add chunks of one token each, all of the first choice."""
        parts = self.choices.get(0)
        if parts is None:
            parts = self.choices[0] = _ChoiceParts(0)
        docs = _parse_all(
            [b"[" + b",".join(part) + b"]" for part in (chunks.ids, chunks.logprobs, chunks.texts)]
        )
        if len(docs) < 3:  # something in them is no JSON after all
            self.is_damaged = True
            return
        ids, values, texts = docs
        parts.ids = ids if parts.ids is None else parts.ids + ids
        parts.logprobs = values if parts.logprobs is None else parts.logprobs + values
        parts.parts.add({chunks.field: "".join(texts)})

    def reported_tokens(self) -> int | None:
        """The engine's own count of completion tokens over all choices."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        counts = [choice.usage_tokens for choice in self.choices.values()]
        return sum(count for count in counts if count is not None) if counts and None not in counts else None


class StreamReader:
    """Feeds the events of a stream to an Answer, in batches: parsing many chunks at once is cheaper."""

    __slots__ = ("_num_choices", "_pending", "_pending_bytes", "answer", "has_ended", "plain")

    def __init__(self, num_choices: int) -> None:
        self.answer = Answer()
        self.plain: PlainChunks | None = None  # where chunks of the commonest form are taken, not added
        self.has_ended = False  # the part that is held back begins: last finish chunk, error or [DONE]
        self._num_choices = num_choices
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def add(self, data: bytes) -> None:
        """One event's data."""
        if self.plain is not None and self.plain.ids:
            self.parse()  # they came before it
        if not data.startswith(b"{"):
            data = data.strip()
            self.has_ended = self.has_ended or data == b"[DONE]"
            if not data.startswith(b"{"):
                return
        self._pending.append(data)
        self._pending_bytes += len(data)
        is_error = data.startswith(b'{"error"')
        if is_error or _FINISHES.search(data) is not None:
            self.parse()
            self.has_ended = is_error or self.has_ended or self.answer.is_finished(self._num_choices)
        elif self._pending_bytes > _PARSE_EVERY_BYTES:
            self.parse()
        if b'"type"' in data and _TERMINAL_EVENT.search(data) is not None:
            self.has_ended = True

    def parse(self) -> Answer:
        """Bring `answer` up to date."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if pending:
            docs = _parse_all(pending)
            self.answer.is_damaged |= len(docs) < len(pending)
            for doc in docs:
                if isinstance(doc, dict):
                    self.answer.take(doc, is_chunk=True)
        if self.plain is not None and self.plain.ids:
            self.answer.take_plain(self.plain)
            self.plain.clear()
        return self.answer


def _parse_all(texts: Sequence[bytes]) -> list[Any]:
    try:
        docs: list[Any] = orjson.loads(b"[" + b",".join(texts) + b"]")
    except orjson.JSONDecodeError:  # a chunk that is not JSON is the engine's affair; the others still count
        found = [parse(text) for text in texts]
        docs = [doc for doc in found if doc is not None]
    return docs


def _logprob_values(given: Any) -> list[float | None]:
    """Of the sampled tokens, in either API's shape; None where the engine left one out."""
    if not isinstance(given, dict):
        return []
    content = given.get("content")
    if isinstance(content, Tokens):
        return content.logprobs
    if content is not None:
        return [entry.get("logprob") for entry in content]
    return list(given.get("token_logprobs") or ())


def error_text(doc: Any) -> str | None:
    error = doc.get("error") if isinstance(doc, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return None if message is None else str(message)[:MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class Ending:
    """What the relay knows of how the answer ended."""

    http_status: int | None
    policy: str | None
    version_start: int | None
    version_end: int | None
    first_byte_at_ms: int | None
    ended_at_ms: int
    status: CallStatus | None = None  # None: judged by the answer
    error: str | None = None


def make_end(call_id: str, request: Request, answer: Answer, ending: Ending) -> CallEnd:
    """The row of an answer, whole or not."""
    status = _status(request, answer, ending)
    reported = answer.reported_tokens()
    recorded = [_recorded(choice) for _, choice in sorted(answer.choices.items())]
    num_ids = sum(len(choice.completion_ids or ()) for choice in recorded)
    is_whole = reported is None or reported == num_ids or status is not CallStatus.COMPLETE
    is_counted = is_whole and not answer.is_damaged
    prompt = _ids(answer.prompt_ids or None)
    choices = tuple(
        replace(choice, quarantine=_judge(choice, request, ending, prompt, is_counted)) for choice in recorded
    )
    return CallEnd(
        call_id=call_id,
        status=status,
        http_status=ending.http_status,
        upstream_id=answer.upstream_id,
        prompt_ids=prompt,
        choices=choices,
        policy_version_end=ending.version_end,
        reported_completion_tokens=reported,
        error=ending.error or answer.error,
        first_byte_at_ms=ending.first_byte_at_ms,
        ended_at_ms=ending.ended_at_ms,
    )


def _status(request: Request, answer: Answer, ending: Ending) -> CallStatus:
    if answer.error is not None or (ending.http_status or 0) >= 400:
        return CallStatus.ERROR
    if answer.is_finished(request.num_choices):
        return CallStatus.COMPLETE  # whatever became of the connection after the last finish reason
    if ending.status is not None:
        return ending.status
    return CallStatus.ABORTED if request.dialect in ("chat", "completions") else CallStatus.COMPLETE


def _ids(given: list[int] | None) -> TokenIds | None:
    try:
        return None if given is None else token_ids(given)
    except (TypeError, OverflowError):  # not token ids
        return None


def _values(given: list[float | None] | None) -> Logprobs | None:
    try:  # a missing value keeps its position
        return None if given is None else logprobs([MISSING_LOGPROB if v is None else v for v in given])
    except TypeError:
        return None


def _recorded(choice: _ChoiceParts) -> RecordedChoice:
    return RecordedChoice(
        index=choice.index,
        completion_ids=_ids(choice.ids),
        behavior_logprobs=_values(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        message=choice.message if choice.message is not None else choice.parts.message(),
        quarantine=None,
    )


def _judge(
    choice: RecordedChoice, request: Request, ending: Ending, prompt: TokenIds | None, is_counted: bool
) -> Quarantine | None:
    """The first reason why this choice must not be trained."""
    if request.unrecordable is not None:
        return Quarantine.UNRECORDABLE
    return (
        _judge_tokens(choice, prompt, is_counted)
        or request.quarantine
        or (Quarantine.NOT_POLICY if ending.policy is None else None)
        or (Quarantine.VERSION_CHANGED if ending.version_start != ending.version_end else None)
    )


def _judge_tokens(choice: RecordedChoice, prompt: TokenIds | None, is_counted: bool) -> Quarantine | None:
    ids, values = choice.completion_ids, choice.behavior_logprobs
    if choice.finish_reason in (None, "abort", "error"):
        return Quarantine.INCOMPLETE
    if not prompt:
        return Quarantine.NO_PROMPT_IDS
    if not ids:
        return Quarantine.NO_COMPLETION_IDS
    if values is None or len(values) != len(ids):
        return Quarantine.MISALIGNED
    # NaN fails every comparison, so the accepted range is written as one.
    if not all(MISSING_LOGPROB < value <= HIGHEST_LOGPROB for value in values):
        return Quarantine.BAD_LOGPROB
    return None if is_counted else Quarantine.COUNT_MISMATCH
