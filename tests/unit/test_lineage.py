"""The state that a call was made in: what was observed since the last answer, whoever asked and whenever."""

from __future__ import annotations

from typing import Any

from lightning_rl.proxy.attribution.lineage import Lineage

SYSTEM = {"role": "system", "content": "You are in a maze. It is 10:41."}
SAID = {"role": "assistant", "content": "a"}
USER = {"role": "user", "content": "Find the way out."}


def state(*messages: Any) -> str | None:
    return Lineage().place("e", "c", {"messages": list(messages)})[1]


def tool(answer: str, call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": answer}


def asked(call_id: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function"}]}


def test_ids_of_tool_calls_make_no_state() -> None:
    one = state(SYSTEM, USER, asked("call-1"), tool("a wall", "call-1"))
    assert one == state(SYSTEM, USER, asked("call-2"), tool("a wall", "call-2"))
    assert one != state(SYSTEM, USER, asked("call-1"), tool("a door", "call-1"))
    part = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "a wall"}]}
    other = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "y", "content": "a wall"}]}
    assert state(USER, asked("x"), part) == state(USER, asked("y"), other)


def test_everything_since_the_last_answer_counts_in_its_order() -> None:
    both = state(USER, asked("1"), tool("a wall", "1"), tool("a door", "2"))
    assert both != state(USER, asked("1"), tool("a door", "2"))
    assert both != state(USER, asked("1"), tool("a door", "1"), tool("a wall", "2"))
    assert both == state(
        USER, {"role": "assistant", "content": "?"}, tool("a wall", "8"), tool("a door", "9")
    )


def test_instructions_are_no_state_unless_there_is_nothing_else() -> None:
    assert state(SYSTEM, USER) == state(USER) == state({"role": "developer", "content": "x"}, USER)
    assert state(SYSTEM) != state({"role": "system", "content": "another"})
    assert state(USER, {"role": "assistant", "content": "a"}) != state(
        USER, {"role": "assistant", "content": "b"}
    )


def test_what_is_no_message_breaks_nothing() -> None:
    assert state("text", 3, None) != state("text", 3)
    assert Lineage().place("e", "c", {"messages": []}) == (None, None)
    assert Lineage().place("e", "c", None) == (None, None)
    assert (
        Lineage().place(None, "c", {"prompt": "once"})[1] == Lineage().place("e", "c", {"prompt": "once"})[1]
    )


def test_the_parent_is_the_longest_beginning_ids_included() -> None:
    lineage = Lineage()
    lineage.place("e", "c1", {"messages": [USER]})
    lineage.place("e", "c2", {"messages": [USER, asked("1"), tool("a wall", "1")]})
    third = [USER, asked("1"), tool("a wall", "1"), asked("2"), tool("a door", "2")]
    assert lineage.place("e", "c3", {"messages": third})[0] == "c2"
    assert lineage.place("e", "c4", {"messages": [USER, asked("9"), tool("a wall", "9")]})[0] == "c1"


def test_what_is_remembered_is_bounded_over_all_episodes() -> None:
    lineage = Lineage(max_calls=4)
    turns = [{"messages": [USER, *([SAID, USER] * number)]} for number in range(3)]
    for number, doc in enumerate(turns):
        lineage.place("old", f"o{number}", doc)
    assert lineage.place("new", "n0", turns[0])[0] is None
    assert lineage.place("new", "n0 again", turns[0])[0] is None  # the same place, not one more
    assert lineage.place("old", "o3", {"messages": [USER, *([SAID, USER] * 3)]})[0] == "o2"
    assert lineage.place("old", "o4", {"messages": [USER, *([SAID, USER] * 4)]})[0] == "o3"
    assert lineage.place("new", "n1", turns[1])[0] is None  # it was the one that had been silent longest
