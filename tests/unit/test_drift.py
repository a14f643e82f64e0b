"""Each cause of prefix drift, made by what makes it: a template, an agent, a tokenizer."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_rl.records import token_ids
from lightning_rl.store.drift import Cause, Turn, cause_of, extent, shared_tokens
from lightning_rl.store.messages import has_thinking, loose, messages_of, same, tool_calls_of

END = "\x03"
THINK, THOUGHT = "<think>", "</think>"


def encode(text: str) -> Any:
    return token_ids([ord(letter) for letter in text])


def render(message: Mapping[str, Any], *, keeps_thinking: bool = False, json_of: Any = str) -> str:
    """A template of one message: a letter for the role, thinking, text, calls, an end."""
    thinking = message.get("reasoning") if keeps_thinking else None
    said = f"{THINK}{thinking}{THOUGHT}" if thinking else ""
    calls = "".join(json_of(call.raw) for call in tool_calls_of(message))
    return f"{message['role'][0]}:{said}{message.get('content') or ''}{calls}{END}"


def turn(
    messages: list[dict[str, Any]],
    answer: dict[str, Any] | None = None,
    *,
    completion: str | None = None,
    agent: str | None = None,
    tools: Any = None,
    **how: Any,
) -> Turn:
    """A call with these messages; `completion`: what the model wrote, by default the answer as rendered."""
    prompt = json.dumps(tools) + "".join(render(message, **how) for message in messages) + "a:"
    written = completion
    if written is None:
        written = "" if answer is None else render(answer, keeps_thinking=True)[2:]
    return Turn("call", agent, encode(prompt), (encode(written),), tuple(messages), tools, (answer,))


def cause(before: Turn, after: Turn) -> Cause | None:
    at, choice, is_whole = extent(before.prompt_ids, before.completions, after.prompt_ids)
    assert bytes(after.prompt_ids[:at]) == bytes((before.prompt_ids + before.completions[choice])[:at])
    return None if is_whole else cause_of(before, after, at, choice)[0]


SYSTEM = {"role": "system", "content": "You help."}
ASK = {"role": "user", "content": "How much is 1 + 1?"}
ANSWER = {"role": "assistant", "content": "It is 2."}
MORE = {"role": "user", "content": "And 2 + 2?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": 2}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}


def with_arguments(text: str) -> dict[str, Any]:
    return {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "add", "arguments": text}}]}


def test_a_prompt_that_goes_on_is_no_drift() -> None:
    assert cause(turn([SYSTEM, ASK], ANSWER), turn([SYSTEM, ASK, ANSWER, MORE])) is None
    assert cause(turn([SYSTEM, ASK], CALL), turn([SYSTEM, ASK, CALL, RESULT])) is None
    split = {**ANSWER, "content": [{"type": "text", "text": "It is 2."}]}
    assert same(ANSWER, split)


def test_of_several_answers_the_one_that_was_taken_counts() -> None:
    before = turn([ASK], ANSWER)
    other = encode("Two." + END)
    before = Turn("c", None, before.prompt_ids, (other, before.completions[0]), (ASK,), None, (None, ANSWER))
    assert extent(before.prompt_ids, before.completions, turn([ASK, ANSWER, MORE]).prompt_ids)[1:] == (
        1,
        True,
    )


def test_thinking_that_does_not_come_back() -> None:
    thought = {**ANSWER, "reasoning": "one and one"}
    before = turn([SYSTEM, ASK], thought)
    after = turn([SYSTEM, ASK, ANSWER, MORE])
    at, choice, _ = extent(before.prompt_ids, before.completions, after.prompt_ids)
    assert cause_of(before, after, at, choice) == (Cause.THINKING_STRIPPED, "the agent does not send it back")
    after = turn([SYSTEM, ASK, thought, MORE])
    assert cause_of(before, after, at, choice) == (Cause.THINKING_STRIPPED, "the template drops it")
    kept = turn([SYSTEM, ASK, thought, MORE], ANSWER, keeps_thinking=True)
    assert cause(before, kept) is None
    # The next user message makes the template drop what it had kept until then.
    assert cause(kept, turn([SYSTEM, ASK, thought, MORE, ANSWER, ASK])) is Cause.THINKING_STRIPPED
    # An agent that cleans its history only later.
    assert cause(kept, turn([SYSTEM, ASK, ANSWER, MORE, ANSWER, ASK])) is Cause.THINKING_STRIPPED


def test_thinking_between_tags_in_the_text() -> None:
    raw = {**ANSWER, "content": f"{THINK}one and one{THOUGHT}\n\nIt is 2."}
    assert has_thinking(raw)
    assert loose(raw) == loose(ANSWER)
    assert cause(turn([ASK], raw), turn([ASK, ANSWER, MORE])) is Cause.THINKING_STRIPPED


def test_tool_arguments_that_are_written_anew() -> None:
    before = turn([SYSTEM, ASK], CALL)
    for arguments, words in (
        ('{"a": 2, "b": 1}', "the agent re-orders the arguments"),
        ('{"b":1,"a":2}', "the agent writes the arguments anew"),
    ):
        after = turn([SYSTEM, ASK, with_arguments(arguments), RESULT])
        at, choice, _ = extent(before.prompt_ids, before.completions, after.prompt_ids)
        assert cause_of(before, after, at, choice) == (Cause.TOOL_JSON, words)
    template = turn([SYSTEM, ASK, CALL, RESULT], json_of=lambda raw: json.dumps(json.loads(raw), indent=1))
    assert cause(before, template) is Cause.TOOL_JSON
    later = turn([SYSTEM, ASK, CALL, RESULT], ANSWER)
    assert (
        cause(later, turn([SYSTEM, ASK, with_arguments('{"a":2,"b":1}'), RESULT, ANSWER])) is Cause.TOOL_JSON
    )


def test_histories_that_are_cut_or_replaced() -> None:
    long = [
        SYSTEM,
        ASK,
        ANSWER,
        MORE,
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "ok?"},
    ]
    before = turn(long, ANSWER)
    assert cause(before, turn([SYSTEM, *long[3:], ANSWER, ASK])) is Cause.TRUNCATED
    assert cause(before, turn(long[:-2])) is Cause.TRUNCATED
    output = {**RESULT, "content": "a very long output " * 9}
    short = {**RESULT, "content": "a very long output … (cut)"}
    assert cause(turn([ASK, CALL, output], ANSWER), turn([ASK, CALL, short, ANSWER, MORE])) is Cause.TRUNCATED
    summary = {"role": "user", "content": "Summary of what was said: sums."}
    assert cause(before, turn([SYSTEM, summary])) is Cause.COMPACTED
    plain = {"role": "user", "content": "Sums were asked for."}
    assert cause(before, turn([SYSTEM, plain, long[-1]])) is Cause.COMPACTED
    edited = [SYSTEM, ASK, {**ANSWER, "content": "It is 3."}, *long[3:]]
    assert cause(before, turn([*edited, ANSWER, ASK])) is Cause.HISTORY_EDITED


def test_other_agents_and_side_calls() -> None:
    before = turn([SYSTEM, ASK], ANSWER)
    other = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Good or bad?"}]
    assert cause(before, turn(other)) is Cause.OTHER_AGENT
    assert cause(before, turn([SYSTEM, {"role": "user", "content": "Something else."}])) is Cause.OTHER_AGENT
    assert cause(turn([SYSTEM, ASK], ANSWER, agent="a"), turn([SYSTEM, MORE], agent="b")) is Cause.OTHER_AGENT


def test_what_changes_at_the_front() -> None:
    before = turn([SYSTEM, ASK], ANSWER)
    clock = {"role": "system", "content": "You help. It is 12:01."}
    assert cause(before, turn([clock, ASK, ANSWER, MORE])) is Cause.SYSTEM_CHANGED
    assert cause(turn([ASK], ANSWER, tools=["a"]), turn([ASK, ANSWER], tools=["b"])) is Cause.TOOLS_CHANGED
    dated = turn([ASK, ANSWER, MORE])
    dated = Turn("c", None, encode("today ") + dated.prompt_ids, (), dated.messages, None, ())
    assert cause(turn([ASK], ANSWER), dated) is Cause.TEMPLATE


def test_the_answer_on_its_way_back() -> None:
    before = turn([ASK], ANSWER)
    assert cause(before, turn([ASK, {**ANSWER, "content": "It is 3."}, MORE])) is Cause.ANSWER_EDITED
    assert cause(before, turn([ASK, MORE])) is Cause.ANSWER_DROPPED
    assert cause(turn([ASK], {**ANSWER, "content": "It is 2. "}), turn([ASK, ANSWER])) is Cause.WHITESPACE
    after = turn([ASK, ANSWER, MORE])
    assert cause(turn([ASK], ANSWER, completion="It is 2.\x04"), after) is Cause.END_TOKEN
    assert cause(turn([ASK], ANSWER, completion="\u0149t is 2." + END), after) is Cause.RETOKENISED


def test_without_messages_the_cause_is_not_known() -> None:
    before, after = turn([ASK], ANSWER), turn([MORE])
    bare = Turn("c", None, after.prompt_ids, (), None, None, ())
    assert cause(before, bare) is Cause.UNKNOWN
    assert messages_of({"prompt": "x"}) is None
    assert messages_of({"input": "x"}) is None
    assert messages_of({"system": "s", "messages": [ASK]}) == ({"role": "system", "content": "s"}, ASK)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 256, 257])
@pytest.mark.parametrize("at", [0, 1, 5, 200, 300])
def test_the_first_difference_is_found(length: int, at: int) -> None:
    first = token_ids(range(length))
    second = token_ids([value if value < at else value + 1 for value in range(length)])
    assert shared_tokens(first, second) == min(at, length)
    assert shared_tokens(first, first + second) == length
