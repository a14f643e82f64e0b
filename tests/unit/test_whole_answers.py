"""Answers in one piece: read in slices, they say what they say when parsed at once, and are undone alike."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_rl.proxy.messages.capture import Answer, Ending, make_end
from lightning_rl.proxy.messages.inject import inject
from lightning_rl.proxy.messages.request import read_request
from lightning_rl.proxy.messages.splice import parse
from lightning_rl.proxy.messages.whole_answers import read_answer

ASKING = [
    b'{"model":"m","messages":[]}',
    b'{"model":"m","messages":[],"logprobs":true,"top_logprobs":2}',
    b'{"model":"m","messages":[],"return_token_ids":true}',
]
NASTY = ["a", '"', "\\", '"},{"token":"', ']},"finish_reason":', '"logprobs":{"content":[', "é", "[-1,0]", ""]

words = st.sampled_from(NASTY)
numbers = st.sampled_from([-0.5, -1e-9, 0.0, -9999.0, -12.25, None])


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    top = [
        {"token": draw(words), "logprob": draw(numbers), "bytes": [1, 2]}
        for _ in range(draw(st.integers(0, 2)))
    ]
    token = draw(words)
    return {
        "token": token,
        "logprob": draw(numbers),
        "bytes": draw(st.sampled_from([None, list(token.encode())])),
        "top_logprobs": top,
    }


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    choices = []
    for index in range(draw(st.integers(0, 3))):
        given = {"content": draw(st.none() | st.lists(entries(), max_size=12))}
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": draw(words)},
                "logprobs": draw(st.none() | st.just(given)),
                "finish_reason": draw(st.sampled_from(["stop", None])),
                "token_ids": draw(st.none() | st.lists(st.integers(0, 9), max_size=5)),
            }
        )
    return {"id": draw(words), "model": "served", "choices": choices, "prompt_token_ids": [1, 2]}


def recorded(doc: dict[str, Any]) -> str:
    answer = Answer()
    answer.take(doc, is_chunk=False)
    ending = Ending(200, "policy", 1, 1, 1, 2)
    end = make_end("call", read_request("chat", ASKING[0], "application/json"), answer, ending)
    return repr((end, answer.is_damaged))  # NaN is not equal to itself


def same(text: bytes, slice_bytes: int) -> bool:
    """Compares everything; whether anything was cut."""
    known = read_answer(text, slice_bytes=slice_bytes)
    doc = parse(text)
    assert (known.doc is None) == (doc is None)
    if isinstance(doc, dict):
        assert recorded(known.doc) == recorded(doc)
        for body in ASKING:
            injection = inject(read_request("chat", body, "application/json"), "served", None)
            assert known.edited(injection.json_edits(known.short, known.doc)) == injection.undo_json(
                text, doc
            )
    return bool(known.cuts)


@given(answers(), st.integers(1, 400), st.booleans())
def test_slices_say_what_the_whole_says(answer: dict[str, Any], slice_bytes: int, ascii_only: bool) -> None:
    same(json.dumps(answer, separators=(",", ":"), ensure_ascii=ascii_only).encode(), slice_bytes)


@given(answers(), st.integers(1, 100), st.data())
def test_damaged_answers_are_no_json_either_way(
    answer: dict[str, Any], slice_bytes: int, data: st.DataObject
) -> None:
    text = orjson.dumps(answer)
    at = data.draw(st.integers(0, len(text) - 1))
    same(text[:at] + text[at + data.draw(st.integers(1, 3)) :], slice_bytes)
    extra = data.draw(st.sampled_from([b'"', b"]", b"}", b",", b"1", b"{"]))
    same(text[:at] + extra + text[at:], slice_bytes)


ENTRY = b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'


def whole(entries: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    return (
        b'{"model":"served","choices":[{"index":0,"message":{"content":"aa"},%b"logprobs":{"content":[%b]},'
        b'"finish_reason":"stop"%b,"token_ids":[1,2]}],"prompt_token_ids":[1]}' % (before, entries, after)
    )


def test_the_form_of_the_engine_is_cut() -> None:
    assert same(whole(b",".join([ENTRY] * 40)), 100)


@given(st.integers(1, 300))
@example(100)
def test_what_looks_like_it_and_is_not(slice_bytes: int) -> None:
    many = b",".join([ENTRY] * 5)
    for text in (
        whole(many, before=b'"logprobs":null,'),
        whole(many, after=b',"logprobs":null'),  # the last of equal keys counts
        whole(many, after=b',"logprobs":{"content":[-1,0]}'),
        whole(many, before=b'"other":{"logprobs":{"content":[%b]},"finish_reason":1},' % many),
        whole(many, before=b'"other":[-1,0],'),
        whole(many, before=b'"x\\"logprobs":{"content":[%b]},"finish_reason":1,' % many),
        whole(many + b',{"token":"b","logprob":NaN,"top_logprobs":[]}'),
        whole(many + b',{"token":"b","logprob":1e999,"top_logprobs":[]}'),
        whole(many + b',{"token":"b","logprob":123456789012345678901234567890,"top_logprobs":[]}'),
        whole(many + b',{"token":"b","other":[%b],"top_logprobs":[]}' % many),
        whole(many + b',"no entry"'),
        whole(many + b","),
        whole(many + b"," + many[:-1]),
        whole(many + b"],[" + many),
        b"[" + whole(many) + b"]",
    ):
        same(text, slice_bytes)


def test_a_long_answer_pauses_after_every_slice() -> None:
    pauses: list[None] = []
    read_answer(whole(b",".join([ENTRY] * 1000)), lambda: pauses.append(None), 1000)
    assert len(pauses) > 40
