"""Chat answers as vLLM writes them, JSON and streams, each in both forms: asked for tokens, and not."""

from __future__ import annotations

import json
from typing import Any

from lightning_rl.tests.conformance.case import (
    ADDS_CHAT,
    JSON,
    Case,
    body_of,
    fixed,
    recorded,
    replies_with,
    tokens_of,
)
from lightning_rl.tests.conformance.replay import Reply
from lightning_rl.tests.conformance.vllm_forms import (
    Script,
    Step,
    Wants,
    chat_json,
    compact,
    indented,
    interleaved,
    spaced,
    words,
)
from lightning_rl.tests.conformance.wire import Question

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a+b", "parameters": {"type": "object", "properties": {}}},
}
TRICKY = '{"token_ids":[1,2],"logprobs":{"content":[]},"finish_reason":"stop","delta":{},"index":0}'


def tool_delta(index: int | None, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    call: dict[str, Any] = {} if call_id is None else {"id": call_id, "type": "function"}
    if index is not None:
        call["index"] = index
    function: dict[str, Any] = {} if name is None else {"name": name}
    return {"tool_calls": [{**call, "function": {**function, "arguments": arguments}}]}


def held(*ids: int, choice: int = 0) -> Step:
    """Tokens that a parser holds back."""
    return Step(tuple((i, -0.5, f"<{i}>") for i in ids), None, choice=choice)


def said(delta: dict[str, Any], *ids: int, choice: int = 0) -> Step:
    return Step(tuple((i, -0.25, f"w{i}") for i in ids), delta, choice=choice)


def ended(*ids: int, reason: str = "tool_calls", choice: int = 0) -> Step:
    return Step(tuple((i, -0.125, "") for i in ids), None, reason, choice=choice)


def message_of(*calls: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    shown = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in calls
    ]
    return {"content": None, "tool_calls": shown, **more}


PLAIN = Script(tuple(words("I can help")))
UNICODE = Script(tuple(words('naïve "quoted" \\back 日本語 🎉 \u2028 \x7f')))
THREE = Script(interleaved(words("one two three four"), words("five", 2000, 1), words("six seven", 3000, 2)))
ONE_TOOL = Script(
    (
        held(11),
        said(tool_delta(0, "call_1", "add", ""), 12, 13),
        held(14),
        said(tool_delta(0, None, None, '{"a": 1'), 15),
        said(tool_delta(0, None, None, ', "b": 2}'), 16),
        held(17),
        ended(2),
    ),
    (message_of(("call_1", "add", '{"a": 1, "b": 2}')),),
)
PARALLEL_TOOLS = Script(
    (
        said({"content": "Both: "}, 10),
        held(11),
        said(tool_delta(0, "call_1", "add", ""), 12),
        said(tool_delta(0, None, None, "{}"), 13),
        held(14, 15),
        said(tool_delta(1, "call_2", "add", ""), 16),
        said(tool_delta(1, None, None, TRICKY), 17),
        ended(2),
    ),
    (message_of(("call_1", "add", "{}"), ("call_2", "add", TRICKY), content="Both: "),),
)
TOOLS_OF_TWO = Script(
    interleaved(
        [said(tool_delta(0, "same", "add", '{"a":1}'), 21), held(22), ended(2)],
        [
            held(31, choice=1),
            said(tool_delta(0, "same", "add", '{"a":2}'), 32, choice=1),
            ended(2, choice=1),
        ],
    ),
    (message_of(("same", "add", '{"a":1}')), message_of(("same", "add", '{"a":2}'))),
)
REASONING = Script(
    (
        said({"reasoning": "Let me"}, 41),
        said({"reasoning": " think"}, 42),
        held(43),
        said({"content": "4"}, 44),
        ended(2, reason="stop"),
    ),
    ({"content": "4", "reasoning": "Let me think"},),
)
REASONING_AND_TOOL = Script(
    (
        said({"reasoning": "use it"}, 41),
        held(42, 43),
        said(tool_delta(0, "c", "add", "{}"), 44),
        held(45),
        ended(2),
    ),
    (message_of(("c", "add", "{}"), reasoning="use it"),),
)
WHOLE_CALL = Script(
    (held(51, 52, 53), said(tool_delta(0, "c1", "add", '{"a":3}'), 54), ended(2)),
    (message_of(("c1", "add", '{"a":3}')),),
)
REPEATED_ID = Script(
    (
        said(tool_delta(0, "c1", "add", '{"a"'), 61),
        said(tool_delta(0, "c1", "add", ":1}"), 62),
        ended(2),
    ),
    (message_of(("c1", "add", '{"a":1}')),),
)
NO_INDEX = Script(
    (
        said(tool_delta(None, "c1", "add", "{"), 63),
        said(tool_delta(None, None, None, "}"), 64),
        said(tool_delta(None, "c2", "sub", "{}"), 65),
        ended(2),
    ),
    (message_of(("c1", "add", "{}"), ("c2", "sub", "{}")),),
)
SHARED_INDEX = Script(
    (said(tool_delta(0, "c1", "add", "{}"), 66), said(tool_delta(0, "c2", "sub", "{}"), 67), ended(2)),
    (message_of(("c1", "add", "{}"), ("c2", "sub", "{}")),),
)
STOP_STRING = Script(
    (
        *words("How may I", finish=None),
        Step(((1003, -0.5, " assist"),), {"content": " ass"}, "stop", "ist"),
    ),
    ({"content": "How may I ass"},),
)
STOP_ID = Script((*words("a b", finish=None), Step(((77, -0.5, ""),), {"content": ""}, "stop", 77)))
LENGTH = Script((*words("a b", finish=None), Step(((78, -0.5, " c"),), {"content": " c"}, "length")))
MANY_A_CHUNK = Script(
    (said({"content": "a b c"}, 1, 2, 3), said({"content": " d e"}, 4, 5), ended(2, reason="stop"))
)
HUGE_PROMPT = Script(tuple(words("ok")), prompt_ids=tuple(100000 + i % 50000 for i in range(180_000)))
EMPTY = Script((ended(2, reason="stop"),), ({"content": ""},))
LONG = Script(tuple(words(" ".join(f"w{i}" for i in range(400)))))
ODD_EXTRA = {
    "big": 123456789012345678901234567890,
    "tiny": 1e-300,
    "metrics": {"token_ids": [5], "logprobs": {"a": 1}},
}


def chat_cases() -> list[Case]:
    cases = []
    both: dict[str, tuple[Script, dict[str, Any]]] = {
        "plain": (PLAIN, {}),
        "unicode": (UNICODE, {"messages": [{"role": "user", "content": "naïve 日本語 \U0001f389"}]}),
        "n3": (THREE, {"n": 3}),
        "tool": (ONE_TOOL, {"tools": [TOOL]}),
        "parallel-tools": (PARALLEL_TOOLS, {"tools": [TOOL], "parallel_tool_calls": True}),
        "tools-n2": (TOOLS_OF_TWO, {"tools": [TOOL], "n": 2}),
        "reasoning": (REASONING, {}),
        "reasoning-tool": (REASONING_AND_TOOL, {"tools": [TOOL]}),
        "stop-string": (STOP_STRING, {"stop": ["ist"]}),
        "stop-id": (STOP_ID, {"stop_token_ids": [77]}),
        "length": (LENGTH, {"max_tokens": 3}),
        "empty": (EMPTY, {}),
        "long": (LONG, {}),
        "huge-prompt": (HUGE_PROMPT, {}),
        "required-tool": (ONE_TOOL, {"tools": [TOOL], "tool_choice": "required"}),
        "greedy": (PLAIN, {"temperature": 0, "seed": 7}),
        "json-schema": (PLAIN, {"response_format": {"type": "json_object"}}),
        "image": (
            PLAIN,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
        ),
    }
    for name, (script, members) in both.items():
        cases.append(recorded(f"chat-{name}", script, **members))
        cases.append(recorded(f"stream-{name}", script, stream=True, **members))
    streams: dict[str, tuple[Script, dict[str, Any]]] = {
        "whole-call": (WHOLE_CALL, {"tools": [TOOL]}),
        "repeated-id": (REPEATED_ID, {"tools": [TOOL]}),
        "no-index": (NO_INDEX, {"tools": [TOOL]}),
        "shared-index": (SHARED_INDEX, {"tools": [TOOL]}),
        "many-a-chunk": (MANY_A_CHUNK, {}),
        "usage": (ONE_TOOL, {"tools": [TOOL], "stream_options": {"include_usage": True}}),
        "usage-everywhere": (
            PARALLEL_TOOLS,
            {"tools": [TOOL], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        "usage-everywhere-n3": (
            THREE,
            {"n": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    }
    cases += [recorded(f"stream-{n}", script, stream=True, **more) for n, (script, more) in streams.items()]
    cases += _what_the_client_asks_itself()
    cases += _odd_texts()
    return cases


def _what_the_client_asks_itself() -> list[Case]:
    ids, logprobs = ADDS_CHAT
    shapes: dict[str, tuple[dict[str, Any], Any]] = {
        "own-logprobs": ({"logprobs": True}, (ids,)),
        "own-top-logprobs": ({"logprobs": True, "top_logprobs": 3}, (ids,)),
        "own-ids": ({"return_token_ids": True}, (logprobs,)),
        "own-both": ({"logprobs": True, "return_token_ids": True}, ()),
    }
    cases = []
    for name, (members, adds) in shapes.items():
        for kind, more in (("chat", {}), ("stream", {"stream": True})):
            cases.append(
                recorded(f"{kind}-{name}", PARALLEL_TOOLS, adds=adds, tools=[TOOL], **members, **more)
            )
    for name, body, engine_body in (
        (
            "explicit-none",
            b'{"model":"base","return_token_ids": null ,"logprobs":false,"messages":[], "stream" : true}',
            b'{"model":"base","return_token_ids": true ,"logprobs":true,"messages":[], "stream" : true}',
        ),
        (
            "duplicate-keys",
            b'{"model":"no","logprobs":true,"model":"base","messages":[],"logprobs":null,"temperature":1.0}',
            b'{"model":"no","logprobs":true,"model":"base","messages":[],"logprobs":true,"temperature":1.0'
            b',"return_token_ids":true}',
        ),
        (
            "odd-request",
            b' {\n\t"messages" : [ ] ,"seed":18446744073709551615,"x":1.0E+2,"y":-0.0,"z":"\\u00e9\\/",\r\n"model":"base" }\n\n',
            b' {\n\t"messages" : [ ] ,"seed":18446744073709551615,"x":1.0E+2,"y":-0.0,"z":"\\u00e9\\/",\r\n"model":"base" '
            b',"return_token_ids":true,"logprobs":true}\n\n',
        ),
        (
            "keys-inside-strings",
            b'{"model":"base","messages":[{"role":"user","content":"\\"logprobs\\":false,\\"model\\":\\"x\\"}"}]}',
            b'{"model":"base","messages":[{"role":"user","content":"\\"logprobs\\":false,\\"model\\":\\"x\\"}"}]'
            b',"return_token_ids":true,"logprobs":true}',
        ),
    ):
        cases.append(
            Case(
                f"chat-{name}",
                (Question(pieces=(body,)),),
                replies_with(PLAIN),
                tokens=tokens_of(PLAIN),
                engine_body=engine_body,
            )
        )
    return cases


def _odd_texts() -> list[Case]:
    """Answers that are valid JSON, but not spelled as vLLM spells them today."""
    odd = Script(PARALLEL_TOOLS.steps, PARALLEL_TOOLS.messages, extra=ODD_EXTRA)
    cases = [recorded("chat-odd-members", odd, tools=[TOOL])]
    for name, dumps in (("spaced", spaced), ("indented", indented)):
        cases.append(recorded(f"chat-{name}", odd, dumps=dumps, tools=[TOOL]))
        if name == "spaced":
            cases.append(recorded(f"stream-{name}", PARALLEL_TOOLS, dumps=dumps, tools=[TOOL], stream=True))
            cases.append(recorded(f"stream-{name}-n3", THREE, dumps=dumps, n=3, stream=True))
    escaped = lambda doc: json.dumps(doc, separators=(",", ":")).encode()  # noqa: E731
    cases.append(recorded("chat-escaped", UNICODE, dumps=escaped))
    cases.append(recorded("stream-escaped", UNICODE, dumps=escaped, stream=True))
    cases.append(_aborted("chat-aborted", {}))
    cases.append(_aborted("stream-aborted", {"stream": True}))
    cases.append(_numbers_and_duplicates())
    return cases


def _aborted(name: str, members: dict[str, Any]) -> Case:
    script = Script((*words("I was", finish=None), Step((), {"content": ""}, "abort")))
    case = recorded(name, script, **members)
    return Case(case.name, case.questions, case.answer, tokens=case.tokens, adds=case.adds, status="aborted")


def _numbers_and_duplicates() -> Case:
    """Numbers that no parser keeps, and a key that is there twice."""

    def answer(asked: Any) -> Reply:
        body = chat_json(PLAIN, Wants.of(asked.body), compact)
        odd = b'"created":1.764500000E9,"huge":1e400,"nil":-0.0,"big":36893488147419103233,"created":7,'
        return Reply(headers=JSON, blocks=(body.replace(b'"created":1764500000,', odd),))

    return Case(
        "chat-numbers-duplicates",
        (Question(pieces=(body_of(),)),),
        answer,
        tokens=tokens_of(PLAIN),
        adds=ADDS_CHAT,
    )


def other_json_cases() -> list[Case]:
    """JSON answers without tokens, whatever is asked: they pass as they are."""
    texts = {
        "no-choices": b'{"id":"x","choices":[],"usage":null}',
        "not-an-object": b"[1, 2,\t3 ]",
        "not-json": b"<html>\r\n\xff\x00",
        "nothing": b"",
        "odd-numbers": b'{"choices": null, "a": 1.50, "b": 1e5, "b": 1E5 }  \n',
    }
    return [
        Case(
            f"json-{name}",
            (Question(pieces=(body_of(),)),),
            fixed(Reply(headers=JSON, blocks=(text,))),
            adds=ADDS_CHAT,
            status="aborted",
        )
        for name, text in texts.items()
    ]
