"""The quick way through a stream gives what the slow way gives: the same bytes, the same record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.proxy.messages.capture import StreamReader
from lightning_rl.proxy.messages.inject import Injection, inject
from lightning_rl.proxy.messages.plain_chunks import PlainChunks
from lightning_rl.proxy.messages.request import read_request
from lightning_rl.proxy.messages.sse import data_of

texts = st.text(max_size=6) | st.sampled_from(['"', "\\", "}", '"},"logprobs":', "\n\n", "é", "\u2028"])


def chunk(text: str | None, logprob: float, token: int, **more: Any) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "delta": {} if text is None else {"content": text},
        "logprobs": {
            "content": [{"token": text or "", "logprob": logprob, "bytes": [1, 2], "top_logprobs": []}]
        },
        "finish_reason": None,
        "token_ids": [token],
    }
    choice |= {name: value for name, value in more.items() if name in choice}
    rest = {name: value for name, value in more.items() if name not in choice}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    doc = {**head, "choices": [choice], **rest}
    return b"data: " + json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


unusual = st.sampled_from(
    [
        {"index": 1},
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning": "so"}},
        {"delta": {"reasoning": "so", "content": "x"}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"delta":{}}'}}]}},
        {"finish_reason": "stop", "stop_reason": None},
        {"logprobs": None},
        {"token_ids": None},
        {"token_ids": [1, 2]},
        {"usage": {"completion_tokens": 3}},
        {"prompt_token_ids": [1, 2, 3]},
        {"model": "other"},
    ]
)
events = st.lists(
    st.builds(
        chunk,
        texts | st.none(),
        st.floats(max_value=0, allow_infinity=False),
        st.integers(0, 200_000),
    )
    | st.builds(lambda more, text: chunk(text, -0.5, 7, **more), unusual, texts)
    | st.sampled_from(
        [
            b": keep-alive\n\n",
            b"data: [DONE]\n\n",
            b'data: {"id":"chatcmpl-1",\n\n',
            b'event: x\ndata: {"a":1}\n\n',
        ]
    ),
    max_size=12,
)
requests = st.sampled_from(
    [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "return_token_ids": True}]
)


def passed(blocks: list[bytes], injection: Injection, plain: PlainChunks | None) -> tuple[list[bytes], Any]:
    reader = StreamReader(1)
    reader.plain = plain
    seen: list[bytes] = []
    for block in blocks:
        quick = None if plain is None or reader.has_ended else plain.take(block)
        if quick is None:
            data = data_of(block)
            if data is not None:
                reader.add(data)
            quick = injection.undo_block(block)
        seen.append(quick)
    answer = reader.parse()
    choices = [
        (c.index, c.ids, c.logprobs, c.finish_reason, c.parts.message()) for c in answer.choices.values()
    ]
    return seen, (answer.prompt_ids, answer.model, answer.is_damaged, answer.usage_tokens, choices)


@given(events, requests, st.sampled_from([None, "policy-7"]))
def test_both_ways_give_the_same(blocks: list[bytes], asked: dict[str, Any], served: str | None) -> None:
    body = json.dumps({"model": "mine", "messages": [], "stream": True, **asked}).encode()
    injection = inject(read_request("chat", body), served, "base")
    quick = passed(blocks, injection, PlainChunks(injection.undo_block))
    assert quick == passed(blocks, injection, None)


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
def test_a_long_answer_goes_the_quick_way(field: str) -> None:
    injection = inject(read_request("chat", b'{"messages":[]}'), None, None)
    chunks = PlainChunks(injection.undo_block)
    blocks = [chunk(None, -0.25, i, delta={field: f" {i}"}) for i in range(10)]
    taken = [chunks.take(block) for block in blocks]
    assert taken[0] is None  # the one that the others are held to
    assert taken[1:] == [injection.undo_block(block) for block in blocks[1:]]
    assert (chunks.field, len(chunks.ids)) == (field, 9)


def test_text_that_is_no_json_damages_the_answer() -> None:
    injection = inject(read_request("chat", b'{"messages":[]}'), None, None)
    bad = chunk("BAD", -0.25, 5).replace(b"BAD", b"\\x")
    _, (_, _, is_damaged, _, _) = passed(
        [chunk("a", -0.25, 4)] * 2 + [bad], injection, PlainChunks(injection.undo_block)
    )
    assert is_damaged
