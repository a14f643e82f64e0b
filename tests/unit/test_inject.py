"""What is added to a request, and that the answer's bytes are as if it had not been."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.proxy.messages.inject import Injection, inject
from lightning_rl.proxy.messages.request import read_request
from lightning_rl.proxy.messages.splice import locate, set_members

NASTY = st.sampled_from(
    [
        "x",
        '"token_ids":[1,2]',
        ',"finish_reason":"stop"',
        '"logprobs":{"content":[]}',
        "\\",
        '\\"',
        "]}{[",
        "ü\u2028😀",
        '"model":"m"',
        '"delta":{}',
    ]
)


def compact(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()


def spaced(doc: Any) -> bytes:
    return json.dumps(doc, ensure_ascii=True, indent=1).encode()


def chat(**more: Any) -> bytes:
    return compact({"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], **more})


# --- requests ---


def test_members_are_appended_and_everything_else_stays() -> None:
    body = b' { "messages" : [ {"role":"user"} ],\n "temperature":1.0E0, "seed":1e40, "seed":7 } \n'
    sent = inject(read_request("chat", body), None, None).body
    assert sent == body.replace(b" } \n", b' ,"return_token_ids":true,"logprobs":true} \n')


def test_a_member_that_is_there_is_exchanged_in_place() -> None:
    body = b'{"logprobs": false,"messages":[],"return_token_ids":null,"x":{"logprobs":false}}'
    sent = inject(read_request("chat", body), None, None).body
    assert sent == b'{"logprobs": true,"messages":[],"return_token_ids":true,"x":{"logprobs":false}}'


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"model": "gpt-4o","messages":[]}', b'{"model": "p@3","messages":[]'),
        (b'{"messages":[{"model":"x"}],"model":"gpt-4o"}', b'{"messages":[{"model":"x"}],"model":"p@3"'),
        (b'{"model":"a","messages":[],"model":"gpt-4o"}', b'{"model":"a","messages":[],"model":"p@3"'),
        (b'{"mod\\u0065l":"gpt-4o","t":{"model":"b"}}', b'{"mod\\u0065l":"p@3","t":{"model":"b"}'),
        (b'{"messages":[]}', b'{"messages":[],"model":"p@3"'),
    ],
)
def test_the_model_that_counts_is_exchanged(body: bytes, sent: bytes) -> None:
    expected = sent + b',"return_token_ids":true,"logprobs":true}'
    assert inject(read_request("chat", body), "p@3", "base").body == expected


def test_completions_ask_for_zero_alternatives() -> None:
    sent = inject(read_request("completions", b'{"prompt":"a"}'), None, None).body
    assert sent == b'{"prompt":"a","return_token_ids":true,"logprobs":0}'
    sent = inject(read_request("completions", b'{"prompt":"a","logprobs":3}'), None, None).body
    assert sent == b'{"prompt":"a","logprobs":3,"return_token_ids":true}'


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"echo": True}, "echo"),
        ({"include_reasoning": False}, "include_reasoning=false"),
        ({"include_reasoning": "False"}, "include_reasoning=false"),
        ({"top_logprobs": 3}, "top_logprobs without logprobs"),
        ({"top_logprobs": -1, "logprobs": False}, "top_logprobs without logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids without logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": "yes"}, "logprobs is neither true nor false"),
        ({"return_token_ids": "yes"}, "return_token_ids is neither true nor false"),
        (
            {"stream": True, "tools": [{}], "parallel_tool_calls": False},
            "parallel_tool_calls=false in a stream",
        ),
        ({"stream": True, "tools": [{}], "parallel_tool_calls": 0}, "parallel_tool_calls=false in a stream"),
    ],
)
def test_where_injection_could_change_the_answer_nothing_is_injected(
    more: dict[str, Any], reason: str
) -> None:
    body = chat(**more)
    request = read_request("chat", body)
    injection = inject(request, None, None)
    assert request.unrecordable == reason
    assert injection.body == body
    assert injection.is_nothing


def test_the_list_of_such_cases_is_written_down() -> None:
    root = Path(__file__).parents[2]
    reasons = re.findall(r'return "([^"]+)"', (root / "proxy" / "messages" / "request.py").read_text())
    page = (root / "docs" / "recording.md").read_text()
    assert len(reasons) >= 11
    assert [reason for reason in reasons if f"| {reason} |" not in page] == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"a":NaN}', b"\x1f\x8b\x08"])
def test_what_is_not_a_json_object_passes(body: bytes) -> None:
    request = read_request("chat", body)
    assert inject(request, "p@3", "base").body == body
    assert request.unrecordable == "the body is not a JSON object"


def test_other_content_types_pass() -> None:
    request = read_request("chat", chat(), "text/plain")
    assert inject(request, None, None).body == chat()
    assert read_request("chat", chat(), "Application/JSON; charset=utf-8").unrecordable is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt":["a","b"]}', "several prompts in one request"),
        (b'{"prompt":[[1],[2]]}', "several prompts in one request"),
        (b'{"prompt":"a","logprobs":true}', "logprobs is not an integer"),
        (b'{"prompt_embeds":"x"}', "prompt_embeds"),
        (b'{"prompt":[1,2]}', None),
        (b'{"prompt":["a"]}', None),
    ],
)
def test_completions(body: bytes, reason: str | None) -> None:
    assert read_request("completions", body).unrecordable == reason


@given(
    st.dictionaries(
        st.sampled_from(["a", "model", "messages", "logprobs", "é"]), st.none() | NASTY | st.lists(NASTY)
    ),
    st.sampled_from([compact, spaced]),
)
def test_setting_members_is_what_a_parser_sees(doc: dict[str, Any], write: Any) -> None:
    text = set_members(write(doc), [("model", b'"m"'), ("z", b"[1]")], doc.keys())
    assert json.loads(text) == {**doc, "model": "m", "z": [1]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NASTY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=4),
    max_leaves=15,
)


@given(JSON, st.sampled_from([compact, spaced]))
def test_located_values_are_the_values(doc: Any, write: Any) -> None:
    wanted = {("x",), ("x", "*"), ("\\", "x"), ("*", "x"), ()}

    def walk(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
        inner: list[tuple[tuple[str, ...], Any]] = []
        if isinstance(value, dict):
            inner = [found for key, item in value.items() for found in walk(item, (*path, key))]
        elif isinstance(value, list):
            inner = [found for item in value for found in walk(item, (*path, "*"))]
        return inner + ([(path, value)] if path in wanted else [])

    text = write(doc)
    found = [(span.path, json.loads(text[span.start : span.end])) for span in locate(text, wanted)]
    assert found == walk(doc, ())


# --- answers ---


def injection(*, ids: bool = True, logprobs: bool = True, model: str | None = None) -> Injection:
    return Injection(b"", hides_ids=ids, hides_logprobs=logprobs, asked_model=model)


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """A whole chat answer of vLLM, with texts that look like its own syntax."""
    n = draw(st.integers(1, 3))
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": draw(NASTY),
                "tool_calls": [{"arguments": draw(NASTY)}],
            },
            "logprobs": {
                "content": [
                    {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}
                    for token in draw(st.lists(NASTY, max_size=3))
                ]
            },
            "finish_reason": draw(st.sampled_from(["stop", "length", None])),
            "stop_reason": draw(st.none() | NASTY),
            "token_ids": draw(st.lists(st.integers(0, 9), max_size=3)),
        }
        for index in range(n)
    ]
    doc = {"id": "x", "model": "p@3", "choices": choices, "usage": {"completion_tokens": 1}}
    if draw(st.booleans()):  # another engine's order of fields, or nested keys of the same name
        doc["kv_transfer_params"] = {"prompt_token_ids": [5], "logprobs": {"a": 1}, "model": "q"}
    if draw(st.booleans()):
        choices[0]["message"]["extra"] = {"token_ids": [1], "finish_reason": "x"}
    if draw(st.booleans()):
        choices[0]["logprobs"] = choices[0].pop("logprobs")
    return doc | {"prompt_logprobs": None, "prompt_token_ids": [1, 2], "prompt_text": None}


@given(answers(), st.sampled_from([compact, spaced]), st.booleans(), st.booleans(), st.none() | NASTY)
def test_undoing_a_whole_answer_sets_exactly_those_values(
    doc: dict[str, Any], write: Any, ids: bool, logprobs: bool, model: str | None
) -> None:
    text = write(doc)
    visible = injection(ids=ids, logprobs=logprobs, model=model).undo_json(text, orjson.loads(text))
    expected = json.loads(text)
    for choice in expected["choices"]:
        if ids:
            choice["token_ids"] = None
        if logprobs:
            choice["logprobs"] = None
    if ids:
        expected["prompt_token_ids"] = None
    if model is not None:
        expected["model"] = model
    if write is compact:
        assert visible == compact(expected)
    else:
        assert json.dumps(json.loads(visible)) == json.dumps(expected)  # the same order, too


def test_undoing_leaves_odd_spelling_alone() -> None:
    text = (
        b'{"id":"x", "choices": [ {"index":0,"logprobs":{"content":[]},"finish_reason":"stop",'
        b'"token_ids":[1, 2],"n":1.00e5} ],"dup":1,"dup":2,\n"prompt_token_ids":[7]}'
    )
    visible = injection().undo_json(text, orjson.loads(text))
    assert visible == (
        b'{"id":"x", "choices": [ {"index":0,"logprobs":null,"finish_reason":"stop",'
        b'"token_ids":null,"n":1.00e5} ],"dup":1,"dup":2,\n"prompt_token_ids":null}'
    )


CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","model":"p@3","choices":[{"index":0,"delta":'
    b'%s,"logprobs":%s,"finish_reason":%s,"token_ids":%s}]}\n\n'
)
LOGPROBS = b'{"content":[{"token":"\\",\\"finish_reason\\":","logprob":-0.1,"bytes":[1],"top_logprobs":[]}]}'


@pytest.mark.parametrize(
    "delta", [b'{"content":"a"}', b'{"content":"\\"token_ids\\":[3]"}', b'{"tool_calls":[{"index":0}]}']
)
@pytest.mark.parametrize("finish", [b"null", b'"stop"'])
def test_chunks_get_their_nulls_back(delta: bytes, finish: bytes) -> None:
    block = CHUNK % (delta, LOGPROBS, finish, b"[12,13]")
    assert injection().undo_block(block) == CHUNK % (delta, b"null", finish, b"null")
    assert injection(ids=False).undo_block(block) == CHUNK % (delta, b"null", finish, b"[12,13]")
    assert injection(logprobs=False).undo_block(block) == CHUNK % (delta, LOGPROBS, finish, b"null")


def test_the_model_is_put_back_in_every_chunk() -> None:
    undo = injection(model='gpt "4"')
    for text in (b'{"content":"a"}', b'{"content":"b"}', b'{"content":"\\"model\\":\\"p@3\\""}'):
        block = CHUNK % (text, b"null", b"null", b"null")
        assert undo.undo_block(block) == block.replace(b'"p@3"', b'"gpt \\"4\\""', 1)


def test_empty_deltas_are_dropped_only_where_injection_caused_them() -> None:
    empty = CHUNK % (b"{}", LOGPROBS, b"null", b"[1]")
    assert injection().undo_block(empty) == b""
    assert injection(ids=False).undo_block(empty) == CHUNK % (b"{}", b"null", b"null", b"[1]")
    assert injection(logprobs=False).undo_block(empty) == CHUNK % (b"{}", LOGPROBS, b"null", b"null")
    last = CHUNK % (b"{}", LOGPROBS, b'"stop"', b"[1]")
    assert injection().undo_block(last) == CHUNK % (b"{}", b"null", b'"stop"', b"null")
    delta = b'{"content":"\\"delta\\":{}"}'
    visible = injection().undo_block(CHUNK % (delta, LOGPROBS, b"null", b"[1]"))
    assert visible == CHUNK % (delta, b"null", b"null", b"null")


def test_prompt_ids_usage_and_foreign_events() -> None:
    choice = b'{"index":0,"delta":{"role":"assistant"},"logprobs":null,"finish_reason":null}'
    first = b'data: {"choices":[' + choice + b'],"prompt_token_ids":%s,"prompt_text":null}\n\n'
    assert injection().undo_block(first % b"[1,2,3]") == first % b"null"
    for block in (
        b"data: [DONE]\n\n",
        b": keep-alive\n\n",
        b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"error":{"message":"\\"token_ids\\":[1]","code":500}}\n\n',
        b"data: {not json\n\n",
    ):
        assert injection().undo_block(block) == block


def test_unusual_framing_is_kept() -> None:
    block = (CHUNK % (b'{"content":"a"}', LOGPROBS, b"null", b"[1]")).replace(b"\n", b"\r\n")
    block = b"id: 4\r\n" + block.replace(b'"delta"', b'\r\ndata: "delta"')
    visible = injection(model="m").undo_block(block)
    assert visible == block.replace(LOGPROBS, b"null").replace(b"[1]}", b"null}").replace(b"p@3", b"m")


def test_two_choices_in_one_chunk() -> None:
    choice = b'{"index":%d,"delta":{"content":"a"},"logprobs":%s,"finish_reason":null,"token_ids":%s}'
    block = b'data: {"choices":[' + choice + b"," + choice + b"]}\n\n"
    visible = injection().undo_block(block % (0, LOGPROBS, b"[1]", 1, LOGPROBS, b"[2]"))
    assert visible == block % (0, b"null", b"null", 1, b"null", b"null")
