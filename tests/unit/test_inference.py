"""Opt-in attribution: by trace, by the conversation that a call goes on. Ambiguous means unattributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.log_rows import choice, end
from fakes.running_proxy import Running, ask, running_proxy

from lightning_rl.proxy.attribution.inference import AMBIGUOUS, Inference, trace_id
from lightning_rl.records import Attribution

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HI = [{"role": "user", "content": "hi"}]


def by_prefix() -> Inference:
    return Inference(by_trace=False, by_prefix=True)


def infer(inference: Inference, messages: list[dict[str, Any]]) -> Attribution:
    return inference.infer(Attribution(), [], {"messages": messages})


def answered(
    inference: Inference, episode: str | None, messages: list[dict[str, Any]], *answers: Any
) -> None:
    """A call of the episode with these messages was answered so (a text, or a message)."""
    said = [answer if isinstance(answer, dict) else {"content": answer} for answer in answers]
    inference.learn(episode, {"messages": messages}, end("c", None, *(choice(message=m) for m in said)))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what-the-future-brings", TRACE),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        ("nonsense", None),
    ],
)
def test_traceparent(value: str, found: str | None) -> None:
    assert trace_id([(b"traceparent", value.encode())]) == found
    assert trace_id([(b"traceparent", value.encode())] * 2) is None


def test_what_goes_on_joins_and_what_begins_begins() -> None:
    inference = by_prefix()
    first = infer(inference, HI)
    assert first.rule == "prefix"
    assert first.episode_id is not None
    answered(inference, first.episode_id, HI, "hello")
    longer = [*HI, said("hello"), {"role": "user", "content": "and?"}]
    assert infer(inference, longer).episode_id == first.episode_id
    other = [*HI, said("something else"), {"role": "user", "content": "and?"}]
    assert infer(inference, other).episode_id not in (None, first.episode_id)
    assert infer(inference, HI).episode_id != first.episode_id  # the same beginning is no continuation


def test_the_longest_conversation_counts() -> None:
    inference = by_prefix()
    answered(inference, "early", HI, "hello")
    longer = [*HI, said("hello"), {"role": "user", "content": "and?"}]
    answered(inference, "late", longer, "so")
    assert infer(inference, [*longer, said("so"), HI[0]]).episode_id == "late"


def test_siblings_that_can_not_be_told_apart_are_ambiguous() -> None:
    inference = by_prefix()
    for episode, answer in (("a", "same"), ("b", "same"), ("b", "own")):
        answered(inference, episode, HI, answer)
    found = infer(inference, [*HI, said("same"), HI[0]])
    assert (found.episode_id, found.rule, found.conflict) == (None, "none", AMBIGUOUS)
    assert infer(inference, [*HI, said("own"), HI[0]]).episode_id == "b"
    answered(inference, None, [*HI, said("same"), HI[0]], "next")  # and so is what follows from it
    assert infer(inference, [*HI, said("same"), HI[0], said("next"), HI[0]]).episode_id is None


def test_every_choice_can_be_gone_on_from() -> None:
    inference = by_prefix()
    answered(inference, "e", HI, "one", "two")
    assert {infer(inference, [*HI, said(text), HI[0]]).episode_id for text in ("one", "two")} == {"e"}


def test_the_spelling_of_an_answer_that_comes_back_does_not_matter() -> None:
    inference = by_prefix()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    answered(inference, "e", HI, {"content": None, "tool_calls": [call], "reasoning": "hm", "refusal": None})
    echoed = {"name": "add", "arguments": '{"b":2,"a":1}'}
    back = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "function": echoed}]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert infer(inference, [*parts, back, result]).episode_id == "e"


# --- through the proxy ---


def chat(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "base", "messages": messages}).encode()


def episodes_of(running: Running) -> list[tuple[str | None, str]]:
    ask(running.url, "/lightning/api/status")
    rows = sorted(running.rows("calls"), key=lambda row: (row["started_at_ms"], row["id"]))
    return [(row["episode_id"], row["attribution_rule"]) for row in rows]


def test_off_unless_switched_on(tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    with running_proxy(tmp_path) as running:
        ask(running.url, CHAT, chat(HI), headers)
        assert episodes_of(running) == [(None, "none")]
        assert headers.items() <= dict(running.engine.received[-1]["headers"]).items()


def test_by_trace_and_never_against_a_mark(tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    with running_proxy(tmp_path, attribute_by_trace=True) as running:
        ask(running.url, CHAT, chat(HI), headers)
        ask(running.url, f"/episodes/e{CHAT}", chat(HI), headers)
        ask(running.url, CHAT, chat(HI))
        assert episodes_of(running) == [(f"trace-{TRACE}", "traceparent"), ("e", "path"), (None, "none")]
        assert {row["attribution_conflict"] for row in running.rows("calls")} == {None}


def test_by_conversation(tmp_path: Path) -> None:
    with running_proxy(tmp_path, attribute_by_prefix=True) as running:
        answer = json.loads(ask(running.url, CHAT, chat(HI)).body)["choices"][0]["message"]
        longer = [*HI, said(answer["content"]), {"role": "user", "content": "more"}]
        ask(running.url, CHAT, json.dumps({"model": "base", "messages": longer, "stream": True}).encode())
        ask(running.url, CHAT, chat([*longer, said(answer["content"]), HI[0]]))
        found = episodes_of(running)
    assert len(set(found)) == 1
    assert found[0][1] == "prefix"
    assert str(found[0][0]).startswith("conversation-")


def test_only_chats_are_taken_for_conversations(tmp_path: Path) -> None:
    doc = {"model": "policy", "max_tokens": 5, "messages": HI}
    with running_proxy(tmp_path, attribute_by_prefix=True, dialects="pass") as running:
        ask(running.url, "/v1/messages", json.dumps(doc).encode())
        assert episodes_of(running) == [(None, "none")]


def test_messages_nested_too_deep_to_be_hashed_go_on_from_nothing_known(tmp_path: Path) -> None:
    content: Any = "hi"
    for _ in range(300):
        content = [content]
    with running_proxy(tmp_path, attribute_by_prefix=True) as running:
        assert ask(running.url, CHAT, chat([{"role": "user", "content": content}])).status == 200
        assert episodes_of(running) == [(None, "none")]
