"""What is put back into LiteLLM's requests, and straightened in its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_rl.proxy.dialects import shape
from lightning_rl.proxy.dialects.rendering import Refused, Rendered, read_rendering, render_request
from lightning_rl.proxy.dialects.translatable import chat_body, untranslatable

SHOWN = shape.Shown("resp_1", "gpt-4o", {"instructions": "be good", "tools": [{"type": "function"}]})


def text_item(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text}]}


def test_an_empty_message_before_a_tool_call_is_dropped_and_a_lone_one_kept() -> None:
    call = {"type": "function_call", "name": "f", "cost": None, "namespace": None}
    shaped = shape.response({"output": [text_item(""), call]}, SHOWN)
    assert shaped["output"] == [{"type": "function_call", "name": "f"}]
    assert shape.response({"output": [text_item("")]}, SHOWN)["output"] == [text_item("")]


def test_a_response_repeats_its_request() -> None:
    shaped = shape.response({"output": [], "tools": [{"type": "bent"}], "model": "policy"}, SHOWN)
    assert (shaped["id"], shaped["model"], shaped["instructions"]) == ("resp_1", "gpt-4o", "be good")
    assert shaped["tools"] == [{"type": "function"}]
    assert (shaped["store"], shaped["parallel_tool_calls"]) == (False, True)


def test_usage_has_all_its_parts() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_tokens_details": None}
    assert shape.response({"usage": usage}, SHOWN)["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"token_ids": [1], "sampling_params": {"structured_outputs": None}}, Rendered([1])),
        (200, {"token_ids": [1], "sampling_params": {"structured_outputs": {}}}, Rendered([1], True)),
        (
            400,
            {"error": {"message": "too long", "type": "BadRequestError"}},
            Refused(400, "too long", "BadRequestError"),
        ),
    ],
)
def test_renderings(status: int, body: dict[str, Any], expected: Rendered | Refused) -> None:
    assert read_rendering(status, json.dumps(body).encode()) == expected


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b'{"detail":"Not Found"}'), (403, b'{"error":{"message":"no"}}'), (501, b"?"), (200, b"[]")],
)
def test_an_engine_without_rendering(status: int, body: bytes) -> None:
    rendered = read_rendering(status, body)
    assert isinstance(rendered, Rendered)
    assert rendered.prompt_ids is None
    assert rendered.fault is not None


def test_the_body_that_is_rendered_is_the_agent_s_own() -> None:
    body = b'{ "model":"gpt-4o", "stream": true, "input": "a\\u0062", "temperature":1.00 }'
    expected = b'{ "model":"base", "stream": false, "input": "a\\u0062", "temperature":1.00 }'
    assert render_request(body, json.loads(body), "base") == expected
    assert render_request(b'{"input":"a"}', {"input": "a"}, None) == b'{"input":"a"}'


def chat(dialect: str, doc: dict[str, Any], translated: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(chat_body(dialect, doc, translated, None))
    return found


def test_thinking_becomes_what_vllm_makes_of_it() -> None:
    translated = {"messages": [], "reasoning_effort": "high"}
    budget = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    assert chat("messages", budget, translated) == {"messages": [], "thinking_token_budget": 100}
    off = {"thinking": {"type": "disabled"}}
    assert chat("messages", off, translated) == {"messages": [], "reasoning_effort": "none"}
    effort = {"reasoning": {"effort": "low"}}
    assert chat("responses", effort, translated) == {"messages": [], "reasoning_effort": "low"}


def test_tools_that_vllm_does_not_show_are_not_shown() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]
    translated = {"messages": [], "tools": [{"bent": True}], "tool_choice": "auto"}
    asked = chat("responses", {"tools": tools}, translated)
    assert asked["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat("responses", {"tools": tools[:1]}, translated) == {"messages": []}


def test_arguments_of_a_tool_are_no_media() -> None:
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {"type": "image", "content": []}}
    doc = {"messages": [{"role": "assistant", "content": [used]}]}
    assert untranslatable("messages", doc) is None
    result = {"type": "tool_result", "content": [{"type": "image", "source": {}}]}
    seen = {"messages": [{"role": "user", "content": [result]}]}
    assert untranslatable("messages", seen) == "images, audio or files"
