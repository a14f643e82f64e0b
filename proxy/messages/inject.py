"""What is added to a request, and how it is taken back out of the answer, byte for byte.

vLLM writes `"token_ids":null` and its kin where nobody asked for tokens, so undoing means putting `null`
back in place. It also sends chunks with an empty delta for tokens that its parsers hold back, only because
ids were asked for: those are dropped. The quick ways count keys: where each occurs exactly as often as the
answer has choices, searching bytes is as good as parsing; all else goes through the scanner of splice.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from .request import Request
from .splice import Edit, apply, locate, only_string_member, parse, set_members
from .sse import data_of, edit_data

_TOKEN_IDS = re.compile(rb'"token_ids"\s*:\s*(\[[0-9, \t\r\n]*+\])')
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*(\[[0-9, \t\r\n]*+\])')
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]++|\\.)*+")', re.DOTALL)
_LOGPROBS_KEY = b'"logprobs":'
_AFTER_LOGPROBS = b',"finish_reason":'
_EMPTY_DELTA = re.compile(rb'"delta"\s*:\s*\{\s*\}')
_INJECTED_VALUE = re.compile(rb'"(?:token_ids|prompt_token_ids|logprobs)"\s*:\s*')

_IDS_PATHS = (("prompt_token_ids",), ("choices", "*", "prompt_token_ids"), ("choices", "*", "token_ids"))
_LOGPROBS_PATH = ("choices", "*", "logprobs")
_MODEL_PATHS = (("model",), ("response", "model"), ("message", "model"))


class Injection:
    """One call's changes. `body` is what the engine is sent; the methods undo them in its answer."""

    __slots__ = (
        "_after_cr",
        "_asked_model",
        "_drops_empty",
        "_hides_ids",
        "_hides_logprobs",
        "_new_head",
        "_old_head",
        "body",
    )

    def __init__(
        self, body: bytes, *, hides_ids: bool, hides_logprobs: bool, asked_model: str | None
    ) -> None:
        self.body = body
        self._hides_ids = hides_ids
        self._hides_logprobs = hides_logprobs
        # Who asks for either gets the chunks with empty deltas from the engine itself.
        self._drops_empty = hides_ids and hides_logprobs
        self._asked_model = None if asked_model is None else orjson.dumps(asked_model)
        self._old_head = self._new_head = b""
        self._after_cr = False  # a dropped block ended in CR: a LF that follows belonged to it

    @property
    def is_nothing(self) -> bool:
        """The answer passes untouched."""
        return not (self._hides_ids or self._hides_logprobs or self._asked_model is not None)

    @property
    def asks_tokens(self) -> bool:
        return self._hides_ids or self._hides_logprobs

    def undo_json(self, answer: bytes, doc: Mapping[str, Any]) -> bytes:
        """The JSON answer as the agent is to see it; `doc` is `answer`, parsed."""
        return apply(answer, self.json_edits(answer, doc))

    def json_edits(self, answer: bytes, doc: Mapping[str, Any]) -> list[Edit]:
        """What is to be changed for that."""
        edits = self._model_edits(answer)
        if self.asks_tokens:
            edits += self._null_edits(answer, doc)
        return edits

    def undo_block(self, block: bytes) -> bytes:
        """An event block as the agent is to see it; empty where it would not have been sent."""
        if self.is_nothing:
            return block
        if self._after_cr:
            block = block.removeprefix(b"\n")
        visible = self._undo_block(block)
        if visible:
            self._after_cr = False
            return visible
        self._after_cr = block.endswith(b"\r")
        return block[: len(block) - len(block.lstrip(b"\r\n"))]  # blank lines before it were not its own

    def _undo_block(self, block: bytes) -> bytes:
        data = data_of(block)
        if data is None or not data.lstrip().startswith(b"{"):
            return block
        # `data: …\n\n` and nothing else
        if len(data) + 8 == len(block) and block.startswith(b"data: ") and block.endswith(b"\n\n"):
            visible = self._undo_chunk(data)
            return block if visible is data else b"" if visible is None else b"data: " + visible + b"\n\n"
        if parse(data) is None:
            return block
        if self._is_dropped(data):
            return b""
        edits = self._model_edits(data) + (self._scanned_edits(data) if self.asks_tokens else [])
        return edit_data(block, edits) if edits else block

    def undo_rest(self, rest: bytes) -> bytes:
        """What a broken stream leaves of an event, up to where the engine says more than was asked."""
        if self.is_nothing or not rest:
            return rest
        if self._after_cr:
            rest = rest.removeprefix(b"\n")
        data = data_of(rest)
        if data is None or not data.lstrip().startswith(b"{"):
            return rest
        if parse(data) is not None:
            return self.undo_block(rest)
        if self.asks_tokens and (match := _INJECTED_VALUE.search(rest)):
            rest = rest[: match.end()]
        return apply(rest, self._model_edits(rest)) if rest.count(b'"model"') == 1 else rest

    def _undo_chunk(self, data: bytes) -> bytes | None:
        if self.asks_tokens:
            if self._is_dropped(data):
                return None
            data = self._null_chunk(data)
        if self._asked_model is None:
            return data
        # All chunks of a stream begin alike, up to the model's name.
        if not (self._old_head and data.startswith(self._old_head)):
            edits = self._model_edits(data)
            if len(edits) != 1 or b"{" in data[1 : edits[0].start]:
                return apply(data, edits)
            self._old_head = data[: edits[0].end]
            self._new_head = apply(self._old_head, edits)
        return self._new_head + data[len(self._old_head) :]

    def _is_dropped(self, data: bytes) -> bool:
        """An empty delta that does not finish, with tokens: the engine sends it only to those who asked."""
        if not self._drops_empty or _EMPTY_DELTA.search(data) is None:
            return False
        doc = parse(data)
        choices = doc.get("choices") if isinstance(doc, dict) else None
        if not isinstance(choices, list):
            return False
        return bool(choices) and all(
            isinstance(choice, dict)
            and choice.get("delta") == {}
            and choice.get("finish_reason") is None
            and (choice.get("token_ids") is not None or choice.get("logprobs") is not None)
            for choice in choices
        )

    def _null_chunk(self, data: bytes) -> bytes:
        """The quick way, for vLLM's own spelling; where counting does not confirm it, the scanner."""
        quick = data
        certain = data.count(_AFTER_LOGPROBS) == 1
        if self._hides_ids:
            for key, pattern in ((b'"token_ids"', _TOKEN_IDS), (b'"prompt_token_ids"', _PROMPT_IDS)):
                if (times := data.count(key)) == 1 and (match := pattern.search(quick)):
                    quick = quick[: match.start(1)] + b"null" + quick[match.end(1) :]
                certain = certain and times <= 1 and quick.count(key) == quick.count(key + b":null")
        if self._hides_logprobs:
            start = quick.find(b'"logprobs":{"')
            end = quick.find(_AFTER_LOGPROBS, start) if start >= 0 else -1
            if end >= 0 and not quick.startswith(b'content":null', start + 13):
                quick = quick[: start + len(_LOGPROBS_KEY)] + b"null" + quick[end:]
            certain = certain and quick.count(b'"logprobs"') == quick.count(b'"logprobs":null') <= 1
        if certain:
            return quick
        is_chunk = b'"choices"' in data and parse(data) is not None
        return apply(data, self._scanned_edits(data)) if is_chunk else data

    def _null_edits(self, answer: bytes, doc: Mapping[str, Any]) -> list[Edit]:
        choices = doc.get("choices")
        if not isinstance(choices, list) or not choices:
            return []
        num = len(choices)
        if not all(isinstance(choice, dict) and "token_ids" in choice for choice in choices):
            return self._scanned_edits(answer)
        edits: list[Edit] = []
        if self._hides_ids:
            prompt_num = num if "prompt_token_ids" in choices[0] else 1
            if answer.count(b'"token_ids"') != num or answer.count(b'"prompt_token_ids"') != prompt_num:
                return self._scanned_edits(answer)
            for pattern in (_TOKEN_IDS, _PROMPT_IDS):
                edits += [Edit(*match.span(1), b"null") for match in pattern.finditer(answer)]
        if self._hides_logprobs:
            if answer.count(_LOGPROBS_KEY) != num or answer.count(_AFTER_LOGPROBS) != num:
                return self._scanned_edits(answer)
            position = 0
            for choice in choices:
                start = answer.find(_LOGPROBS_KEY, position) + len(_LOGPROBS_KEY)
                position = answer.find(_AFTER_LOGPROBS, start)
                names = list(choice)
                after = names.index("logprobs") + 1 if "logprobs" in names else len(names)
                if (
                    start < len(_LOGPROBS_KEY)
                    or position < 0
                    or names[after : after + 1] != ["finish_reason"]
                ):
                    return self._scanned_edits(answer)
                given = choice["logprobs"]
                if not isinstance(given, dict) or given.get("content", given) is not None:
                    edits.append(Edit(start, position, b"null"))
        return edits

    def _scanned_edits(self, text: bytes) -> list[Edit]:
        """The slow and certain way: every value that is not null already, at exactly the right place."""
        wanted = set(_IDS_PATHS) if self._hides_ids else set()
        if self._hides_logprobs:
            wanted.add(_LOGPROBS_PATH)
        spans = locate(text, wanted)
        return [Edit(s.start, s.end, b"null") for s in spans if _holds_tokens(text[s.start : s.end])]

    def _model_edits(self, text: bytes) -> list[Edit]:
        if self._asked_model is None:
            return []
        if text.count(b'"model"') == 1:
            match = _MODEL.search(text)
            return [Edit(*match.span(1), self._asked_model)] if match else []
        return [
            Edit(span.start, span.end, self._asked_model)
            for span in locate(text, _MODEL_PATHS)
            if text[span.start : span.start + 1] == b'"'
        ]


def _holds_tokens(value: bytes) -> bool:
    """Not null, nor the empty frame that other engines send to everybody."""
    if not value.startswith(b"{"):
        return value != b"null"
    doc = parse(value)
    return not isinstance(doc, dict) or doc.get("content", doc) is not None


def inject(request: Request, served_model: str | None, shown_model: str | None) -> Injection:
    """Decide what the engine is sent for `request`.

    `served_model` None leaves the model as the agent wrote it; otherwise answers show the agent's own word,
    or `shown_model` where it named none (what the engine would have said by itself).
    """
    doc = request.doc
    if doc is None:
        return Injection(request.body, hides_ids=False, hides_logprobs=False, asked_model=None)
    members: list[tuple[str, bytes]] = []
    hides_ids = request.unrecordable is None and not doc.get("return_token_ids")
    asks_for_none = doc.get("logprobs") is None or (request.dialect == "chat" and not doc["logprobs"])
    hides_logprobs = request.unrecordable is None and asks_for_none
    body = request.body
    if served_model is not None:
        body, added = _set_model(body, doc, orjson.dumps(served_model))
        members += added
    if hides_ids:
        members.append(("return_token_ids", b"true"))
    if hides_logprobs:
        members.append(("logprobs", b"true" if request.dialect == "chat" else b"0"))
    if members:
        body = set_members(body, members, doc.keys())
    asked = None if served_model is None else request.model or shown_model
    return Injection(body, hides_ids=hides_ids, hides_logprobs=hides_logprobs, asked_model=asked)


def _set_model(body: bytes, doc: Mapping[str, Any], model: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The body with its model exchanged, or, where that takes the scanner, the member to set."""
    span = only_string_member(body, b"model") if isinstance(doc.get("model"), str) else None
    if span is None or orjson.loads(body[slice(*span)]) != doc["model"]:
        return body, [("model", model)]
    return apply(body, [Edit(*span, model)]), []
