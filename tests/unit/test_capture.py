"""From answers to rows: exact tokens, assembled messages, and why a choice must not be trained."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_rl.proxy.messages.assemble import MessageParts
from lightning_rl.proxy.messages.capture import Answer, Ending, StreamReader, make_end
from lightning_rl.proxy.messages.request import read_request
from lightning_rl.records import CallEnd, CallStatus, Quarantine

ENDING = Ending(
    http_status=200, policy="policy", version_start=3, version_end=3, first_byte_at_ms=1, ended_at_ms=2
)


def request(**more: Any) -> Any:
    return read_request("chat", json.dumps({"messages": [], **more}).encode())


def choice(index: int = 0, **more: Any) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    said = {"index": index, "message": {"role": "assistant", "content": "hi"}, "logprobs": logprobs}
    return {**said, "finish_reason": "stop", "stop_reason": None, "token_ids": [7, 8], **more}


def whole(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {"completion_tokens": 2 * len(choices)}
    return {
        "id": "chatcmpl-9",
        "model": "m",
        "choices": list(choices),
        "usage": usage,
        "prompt_token_ids": [1, 2],
        **more,
    }


def end_of(doc: dict[str, Any], ending: Ending = ENDING, **asked: Any) -> CallEnd:
    answer = Answer()
    answer.take(doc, is_chunk=False)
    return make_end("call", request(**asked), answer, ending)


def test_a_whole_answer() -> None:
    end = end_of(whole(choice(0), choice(1, token_ids=[9, 10], stop_reason="END")), n=2)
    assert (end.status, end.upstream_id, end.reported_completion_tokens) == (
        CallStatus.COMPLETE,
        "chatcmpl-9",
        4,
    )
    assert end.prompt_ids is not None
    assert end.prompt_ids.tolist() == [1, 2]
    first, second = end.choices
    assert first.completion_ids is not None
    assert first.behavior_logprobs is not None
    assert first.completion_ids.tolist() == [7, 8]
    assert first.behavior_logprobs.tolist() == [-0.5, -0.25]
    assert (first.quarantine, second.quarantine, second.stop_reason) == (None, None, "END")
    assert first.message == {"role": "assistant", "content": "hi"}


def lp(*values: float | None) -> dict[str, Any]:
    return {"content": [{"logprob": value} for value in values]}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"finish_reason": "abort"}, Quarantine.INCOMPLETE),
        ({"finish_reason": None}, Quarantine.INCOMPLETE),
        ({"token_ids": None}, Quarantine.NO_COMPLETION_IDS),
        ({"token_ids": []}, Quarantine.NO_COMPLETION_IDS),
        ({"logprobs": None}, Quarantine.MISALIGNED),
        ({"logprobs": lp(-0.5)}, Quarantine.MISALIGNED),
        ({"logprobs": lp(-0.5, None)}, Quarantine.BAD_LOGPROB),
        ({"logprobs": lp(-0.5, -9999.0)}, Quarantine.BAD_LOGPROB),
        ({"logprobs": lp(-0.5, 2e-5)}, Quarantine.BAD_LOGPROB),
        ({"logprobs": lp(-0.5, float("inf"))}, Quarantine.BAD_LOGPROB),
        ({"logprobs": lp(float("nan"), -0.5)}, Quarantine.BAD_LOGPROB),
        ({"logprobs": lp(0.0, 1e-6)}, None),
        ({"token_ids": [7], "logprobs": lp(-0.5)}, Quarantine.COUNT_MISMATCH),
        ({"finish_reason": "length"}, None),
    ],
)
def test_what_a_row_must_prove(changed: dict[str, Any], reason: Quarantine | None) -> None:
    assert end_of(whole(choice(**changed))).choices[0].quarantine is reason


def test_a_missing_logprob_keeps_its_position() -> None:
    values = end_of(whole(choice(logprobs=lp(None, -0.5)))).choices[0].behavior_logprobs
    assert values is not None
    assert values.tolist() == [-9999.0, -0.5]


def test_prompt_ids_must_be_there() -> None:
    assert end_of(whole(choice(), prompt_token_ids=None)).choices[0].quarantine is Quarantine.NO_PROMPT_IDS


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0}, Quarantine.TEMPERATURE_ZERO),
        ({"temperature": 0.005}, Quarantine.TEMPERATURE_ZERO),
        ({"temperature": "0"}, Quarantine.TEMPERATURE_ZERO),
        ({"temperature": 0.7}, None),
        ({"temperature": "warm"}, None),
        ({"temperature": None}, None),
        ({"top_p": 0.9}, Quarantine.TRUNCATED_SUPPORT),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0}, None),
        ({"top_k": 50}, Quarantine.TRUNCATED_SUPPORT),
        ({"min_p": 0.1}, Quarantine.TRUNCATED_SUPPORT),
        ({"min_tokens": 4}, Quarantine.TRUNCATED_SUPPORT),
        ({"presence_penalty": 0.5}, Quarantine.PENALTIES),
        ({"repetition_penalty": 1.1}, Quarantine.PENALTIES),
        ({"presence_penalty": 0.0, "repetition_penalty": 1.0}, None),
        ({"logit_bias": {"5": 1}}, Quarantine.LOGIT_BIAS),
        ({"logit_bias": {}}, None),
        ({"response_format": {"type": "json_object"}}, Quarantine.CONSTRAINED),
        ({"response_format": {"type": "text"}}, None),
        ({"tool_choice": "required"}, Quarantine.CONSTRAINED),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, Quarantine.CONSTRAINED),
        ({"tool_choice": "auto", "tools": [{}]}, None),
        ({"guided_json": {}}, Quarantine.CONSTRAINED),
        ({"structured_outputs": {"regex": "a"}}, Quarantine.CONSTRAINED),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, Quarantine.CONSTRAINED),
        ({"tools": [{"function": {"name": "f"}}], "parallel_tool_calls": False}, Quarantine.CONSTRAINED),
        ({"tools": [{"function": {"strict": True}}], "tool_choice": "none"}, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Quarantine.IMAGES),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, None),
        ({"echo": True}, Quarantine.UNRECORDABLE),
    ],
)
def test_what_is_not_reproducible_is_not_trainable(asked: dict[str, Any], reason: Quarantine | None) -> None:
    assert end_of(whole(choice()), **asked).choices[0].quarantine is reason


def test_policy_and_version() -> None:
    other = replace(ENDING, policy=None, version_start=None, version_end=None)
    assert end_of(whole(choice()), other).choices[0].quarantine is Quarantine.NOT_POLICY
    changed = replace(ENDING, version_end=4)
    assert end_of(whole(choice()), changed).choices[0].quarantine is Quarantine.VERSION_CHANGED


def test_errors() -> None:
    end = end_of({"error": {"message": "too long", "code": 400}}, replace(ENDING, http_status=400))
    assert (end.status, end.error, end.choices) == (CallStatus.ERROR, "too long", ())


# --- streams ---


def chunk(delta: dict[str, Any] | None = None, index: int = 0, **more: Any) -> bytes:
    said = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": None}
    top = {key: more.pop(key) for key in ("usage", "prompt_token_ids") if key in more}
    return json.dumps({"id": "c", "model": "m", "choices": [{**said, **more}], **top}).encode()


def read(*datas: bytes, num_choices: int = 1) -> StreamReader:
    reader = StreamReader(num_choices)
    for data in datas:
        reader.add(data)
    return reader


def test_a_stream_with_interleaved_choices() -> None:
    reader = read(
        chunk({"role": "assistant", "content": ""}, 0, prompt_token_ids=[1, 2]),
        chunk({"role": "assistant", "content": ""}, 1, prompt_token_ids=[1, 2]),
        chunk({"content": "a"}, 0, token_ids=[5], logprobs=lp(-0.5)),
        chunk({"content": "x"}, 1, token_ids=[6, 7], logprobs=lp(-1.0, -2.0)),
        chunk({"content": "b"}, 0, token_ids=[8], logprobs=lp(-0.25), finish_reason="stop", stop_reason=3),
        num_choices=2,
    )
    assert not reader.has_ended
    reader.add(chunk({}, 1, token_ids=[9], logprobs=lp(0.0), finish_reason="length"))
    assert reader.has_ended
    reader.add(json.dumps({"id": "c", "choices": [], "usage": {"completion_tokens": 5}}).encode())
    reader.add(b"[DONE]")
    end = make_end("call", request(n=2, stream=True), reader.parse(), ENDING)
    assert (end.status, end.reported_completion_tokens) == (CallStatus.COMPLETE, 5)
    first, second = end.choices
    assert first.completion_ids is not None
    assert second.completion_ids is not None
    assert second.behavior_logprobs is not None
    assert (first.completion_ids.tolist(), second.completion_ids.tolist()) == ([5, 8], [6, 7, 9])
    assert second.behavior_logprobs.tolist() == [-1.0, -2.0, 0.0]
    assert (first.stop_reason, first.quarantine, second.quarantine) == (3, None, None)
    assert first.message == {"role": "assistant", "content": "ab"}


def test_cumulative_usage_counts_each_choice_once() -> None:
    reader = read(
        chunk({"content": "a"}, 0, token_ids=[5], logprobs=lp(-0.5), usage={"completion_tokens": 1}),
        chunk({"content": "b"}, 0, token_ids=[6], logprobs=lp(-0.5), usage={"completion_tokens": 2}),
        chunk({"content": "c"}, 1, token_ids=[7], logprobs=lp(-0.5), usage={"completion_tokens": 1}),
    )
    assert reader.parse().reported_tokens() == 3


def test_how_streams_end_badly() -> None:
    begun = chunk({"content": "a"}, token_ids=[5], logprobs=lp(-0.5), prompt_token_ids=[1])

    def end(*datas: bytes, ending: Ending = ENDING) -> CallEnd:
        return make_end("call", request(stream=True), read(*datas).parse(), ending)

    aborted = end(begun, b"[DONE]")
    assert (aborted.status, aborted.choices[0].quarantine) == (CallStatus.ABORTED, Quarantine.INCOMPLETE)
    abort = chunk({}, finish_reason="abort", token_ids=[])
    assert end(begun, abort, b"[DONE]").status is CallStatus.ABORTED
    failed = end(begun, b'{"error":{"message":"boom"}}', b"[DONE]")
    assert (failed.status, failed.error) == (CallStatus.ERROR, "boom")
    gone = end(begun, ending=replace(ENDING, status=CallStatus.DISCONNECTED))
    assert gone.status is CallStatus.DISCONNECTED
    ids = gone.choices[0].completion_ids
    assert ids is not None
    assert ids.tolist() == [5]


def test_an_answer_that_had_ended_stays_complete_when_the_client_left() -> None:
    last = chunk(
        {"content": "a"}, token_ids=[5], logprobs=lp(-0.5), prompt_token_ids=[1], finish_reason="stop"
    )
    left = replace(ENDING, status=CallStatus.DISCONNECTED)
    end = make_end("call", request(stream=True), read(last).parse(), left)
    assert (end.status, end.choices[0].quarantine) == (CallStatus.COMPLETE, None)


@pytest.mark.parametrize(
    "data",
    [
        b"[DONE]",
        b'{"error":{"message":"x"}}',
        b'{"type":"message_stop"}',
        b'{"response":{},"sequence_number":4,"type":"response.completed"}',
    ],
)
def test_where_the_part_that_is_held_back_begins(data: bytes) -> None:
    assert not read(chunk({"content": "[DONE]"})).has_ended
    assert read(data).has_ended


def test_a_chunk_that_is_not_json_does_not_lose_the_others() -> None:
    reader = read(chunk({"content": "a"}, token_ids=[5]), b"{oops", chunk({"content": "b"}, token_ids=[6]))
    assert reader.parse().choices[0].ids == [5, 6]


def test_legacy_completions() -> None:
    doc = {
        "id": "cmpl-1",
        "choices": [
            {
                "index": 0,
                "text": "hi",
                "logprobs": {"token_logprobs": [-0.5, None], "tokens": ["h", "i"]},
                "finish_reason": "stop",
                "token_ids": [3, 4],
                "prompt_token_ids": [1],
            }
        ],
        "usage": {"completion_tokens": 2},
    }
    answer = Answer()
    answer.take(doc, is_chunk=False)
    end = make_end("call", read_request("completions", b'{"prompt":"a"}'), answer, ENDING)
    assert end.prompt_ids is not None
    assert end.prompt_ids.tolist() == [1]
    assert end.choices[0].message == {"content": "hi"}
    assert end.choices[0].quarantine is Quarantine.BAD_LOGPROB


# --- messages ---


def assembled(*deltas: dict[str, Any]) -> dict[str, Any]:
    parts = MessageParts()
    for delta in deltas:
        parts.add(delta)
    return parts.message()


def call(
    index: int | None = None,
    call_id: str | None = None,
    name: str | None = None,
    arguments: str | None = None,
) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    part: dict[str, Any] = {"function": function}
    if index is not None:
        part["index"] = index
    if call_id is not None:
        part["id"] = call_id
    return {"tool_calls": [part]}


def calls_of(*deltas: dict[str, Any]) -> list[tuple[str | None, str, str]]:
    return [
        (made["id"], made["function"]["name"], made["function"]["arguments"])
        for made in assembled(*deltas)["tool_calls"]
    ]


def test_texts_are_joined_and_roles_are_not() -> None:
    message = assembled(
        {"role": "assistant", "content": "", "refusal": None},
        {"role": "assistant", "reasoning": "hm"},
        {"content": "a", "reasoning": "m"},
        {"content": "b", "reasoning_details": [1]},
        {"reasoning_details": [2]},
    )
    assert message == {
        "role": "assistant",
        "content": "ab",
        "refusal": None,
        "reasoning": "hmm",
        "reasoning_details": [1, 2],
    }


@pytest.mark.parametrize(
    "deltas",
    [
        [call(0, "i", "f", ""), call(0, None, None, '{"a"'), call(0, None, None, ":1}")],
        [call(0, "i", "f", '{"a":1}')],  # whole in one delta
        [call(0, "i", "f", '{"a"'), call(0, "i", "f", ":1}")],  # id and name repeated
        [call(None, "i", "f", '{"a"'), call(None, "i", None, ":1}")],  # no index
        [call(None, "i", "f", '{"a"'), call(None, None, None, ":1}")],  # neither
        [call(1, "i", "f", '{"a"'), call(1, "", "", ":1}")],  # indexes from 1, empty repeats
        [call(0, "i", "f"), call(0, None, None, '{"a":1}')],
    ],
)
def test_one_tool_call(deltas: list[dict[str, Any]]) -> None:
    assert calls_of(*deltas) == [("i", "f", '{"a":1}')]


@pytest.mark.parametrize(
    "deltas",
    [
        [call(0, "i", "f", "1"), call(1, "j", "g", "2")],
        [call(0, "i", "f", ""), call(1, "j", "g", ""), call(0, None, None, "1"), call(1, None, None, "2")],
        [call(0, "i", "f", "1"), call(0, "j", "g", "2")],  # a shared index
        [call(None, "i", "f", "1"), call(None, "j", "g", "2")],  # no index
        [call(0, "i", "f", ""), call(0, "j", "g", "2"), call(0, "i", None, "1")],
    ],
)
def test_two_tool_calls(deltas: list[dict[str, Any]]) -> None:
    assert calls_of(*deltas) == [("i", "f", "1"), ("j", "g", "2")]


def test_the_older_function_call() -> None:
    message = assembled(
        {"function_call": {"name": "f", "arguments": ""}}, {"function_call": {"arguments": "{}"}}
    )
    assert message["function_call"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "doc",
    [
        {"choices": 5},
        {"choices": ["x"]},
        {"choices": [{"index": "x", "delta": {}}]},
        {"choices": [{"index": 0, "delta": 7}]},
        {
            "choices": [
                {"index": 0, "delta": {"tool_calls": "x"}, "token_ids": ["a"], "logprobs": {"content": 1}}
            ]
        },
        {"choices": [{"index": 0, "delta": {}, "token_ids": [-1], "finish_reason": {"a": 1}}], "usage": 3},
        {"choices": [], "usage": {"completion_tokens": "many"}, "prompt_token_ids": "x"},
    ],
)
def test_what_has_not_the_shape_of_an_answer_is_recorded_as_damaged(doc: dict[str, Any]) -> None:
    for is_stream in (True, False):
        reader = StreamReader(1)
        if is_stream:
            reader.add(json.dumps(doc).encode())
            reader.parse()
        else:
            reader.answer.take(doc, is_chunk=False)
        end = make_end("c", request(), reader.answer, ENDING)
        assert all(choice.quarantine is not None for choice in end.choices)
