"""Whether a call's prompt goes on where an earlier call ended, and if not, why. Pure: no SQL, no tokenizer.

Training shares what successive prompts have in common, and a policy is trained on what it saw: where the
prompt of turn k+1 is not prompt + completion of turn k, tokens are computed twice, or the model is shown a
history that it never produced. Judged from token ids alone; the cause is read from the stored messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..records import TokenIds
from .messages import Message, has_thinking, loose, same, text_of, tool_calls_of

_GENERATION_PROMPT_TOKENS = 8
"""A template's last words before the answer; histories may be written without them."""
_SUMMARY_SIGNS = ("summary", "summariz", "summaris", "continued from a previous", "compact")


class Cause(StrEnum):
    """Why a prompt does not extend the one before."""

    THINKING_STRIPPED = "thinking_stripped"
    TOOL_JSON = "tool_json"
    TRUNCATED = "truncated"
    COMPACTED = "compacted"
    OTHER_AGENT = "other_agent"
    RETOKENISED = "retokenised"
    END_TOKEN = "end_token"
    WHITESPACE = "whitespace"
    ANSWER_EDITED = "answer_edited"
    ANSWER_DROPPED = "answer_dropped"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE = "template"
    HISTORY_EDITED = "history_edited"
    UNKNOWN = "unknown"


ADVICE = {
    Cause.THINKING_STRIPPED: "the chat template drops thinking of earlier turns: use a template that keeps "
    "it, "
    "or train each turn by itself and expect its prompt to be computed anew",
    Cause.TOOL_JSON: "the arguments of tool calls come back written differently (key order, spaces): let "
    "the agent "
    "send them back as it got them, or use a template that does not write JSON anew",
    Cause.TRUNCATED: "the agent drops or shortens old messages: raise its context limit, or expect each "
    "cut to "
    "start a new prefix",
    Cause.COMPACTED: "the agent replaces its history by a summary: each summary starts a new prefix; "
    "summarise "
    "less often where that costs too much",
    Cause.OTHER_AGENT: "another agent or a side call: name agents (X-Lightning-Agent), and mark side calls "
    "(lightning calls kind side CALL)",
    Cause.RETOKENISED: "the same text was split into other tokens: send histories as token ids, or accept "
    "that "
    "the turns are computed separately",
    Cause.END_TOKEN: "the template ends an answer with another token than the model does: align the "
    "template's "
    "end of turn with the model's",
    Cause.WHITESPACE: "spaces of the answer change on the way back: send the content back as it came",
    Cause.ANSWER_EDITED: "the agent sends another answer back than it got: keep answers unchanged in the "
    "history",
    Cause.ANSWER_DROPPED: "the agent leaves the answer out of its history: send it back as the assistant's "
    "message",
    Cause.SYSTEM_CHANGED: "the system message changes between turns (a clock, a counter): move what "
    "changes to the "
    "end of the prompt",
    Cause.TOOLS_CHANGED: "the list of tools changes between turns: keep it, and its order, for the whole "
    "episode",
    Cause.TEMPLATE: "the template writes the same messages differently from turn to turn (a date, a "
    "position): look "
    "for what depends on the turn",
    Cause.HISTORY_EDITED: "the agent changes messages of earlier turns: append instead",
    Cause.UNKNOWN: "the messages of these calls are not in the log",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One call, as far as drift is concerned. `completions` and `answers` are aligned: one per choice."""

    call_id: str
    agent: str | None
    prompt_ids: TokenIds
    completions: tuple[TokenIds, ...]
    messages: tuple[Message, ...] | None  # None: not known
    tools: Any
    answers: tuple[Message | None, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Where the prompt of `call_id` leaves prompt + completion of `previous_call_id`, and why."""

    episode_id: str
    previous_call_id: str
    call_id: str
    cause: Cause
    detail: str
    at_token: int  # first token that differs; tokens from here on are not shared
    num_prompt_tokens: int


def shared_tokens(first: TokenIds, second: TokenIds) -> int:
    """Length of the common prefix; by halving, so that arrays are compared in C."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def extent(before: TokenIds, completions: Sequence[TokenIds], after: TokenIds) -> tuple[int, int, bool]:
    """(tokens of `after` that continue `before` and its best completion, which completion, all of them?)."""
    shared = shared_tokens(before, after)
    if shared < len(before):
        return shared, 0, False
    rest = after[shared:]
    found = [(shared_tokens(completion, rest), index) for index, completion in enumerate(completions)]
    length, index = max(found, key=lambda pair: (pair[0] == len(completions[pair[1]]), *pair), default=(0, 0))
    is_whole = bool(completions) and length == len(completions[index])
    return shared + length, index, is_whole


def cause_of(before: Turn, after: Turn, at: int, choice: int) -> tuple[Cause, str]:
    """Why `after` leaves `before` at this token; `choice`: the completion that it follows furthest."""
    old, new = before.messages, after.messages
    if old is None or new is None:
        return Cause.UNKNOWN, "no messages"
    kept = _leading(old, new)
    if kept == len(old):
        return _with_whole_history(before, after, at, choice)
    if before.agent != after.agent:
        return Cause.OTHER_AGENT, f"{before.agent or 'no name'}, then {after.agent or 'no name'}"
    return _with_changed_history(old, new, kept)


def _with_whole_history(before: Turn, after: Turn, at: int, choice: int) -> tuple[Cause, str]:
    assert before.messages is not None
    assert after.messages is not None
    answer = before.answers[choice] if choice < len(before.answers) else None
    num_prompt = len(before.prompt_ids)
    is_thinking = answer is not None and has_thinking(answer)
    is_at_end = at >= num_prompt - _GENERATION_PROMPT_TOKENS
    back = after.messages[len(before.messages) :]
    if is_at_end and (not back or back[0].get("role") != "assistant"):
        return Cause.ANSWER_DROPPED, "no assistant message follows"
    if at >= num_prompt or (is_thinking and is_at_end):
        if answer is None:
            return Cause.UNKNOWN, "the answer's text is not in the log"
        last = num_prompt + len(before.completions[choice]) - 1
        return _answer_came_back_as(answer, back[0], is_last_token=at == last)
    if before.tools != after.tools:
        return Cause.TOOLS_CHANGED, "other tools"
    if any(has_thinking(message) for message in before.messages):
        return Cause.THINKING_STRIPPED, "the template drops it from earlier turns"
    return Cause.TEMPLATE, "the same messages, written differently"


def _answer_came_back_as(answer: Message, back: Message, *, is_last_token: bool) -> tuple[Cause, str]:
    if loose(answer) != loose(back):
        return Cause.ANSWER_EDITED, "its text or its tool calls differ"
    if has_thinking(answer):
        by = "the template drops it" if has_thinking(back) else "the agent does not send it back"
        return Cause.THINKING_STRIPPED, by
    if tool_calls_of(answer):
        return Cause.TOOL_JSON, _how_json_differs(answer, back)
    if text_of(answer) != text_of(back):
        return Cause.WHITESPACE, "spaces around the answer"
    if is_last_token:
        return Cause.END_TOKEN, "only the answer's last token differs"
    return Cause.RETOKENISED, "the same text, other tokens"


def _how_json_differs(answer: Message, back: Message) -> str:
    given, returned = tool_calls_of(answer), tool_calls_of(back)
    if [call.raw for call in given] == [call.raw for call in returned]:
        return "the template writes the arguments anew"
    is_reordered = [call.keys for call in given] != [call.keys for call in returned]
    return "the agent re-orders the arguments" if is_reordered else "the agent writes the arguments anew"


def _with_changed_history(  # noqa: PLR0911 - a return per cause
    old: Sequence[Message], new: Sequence[Message], kept: int
) -> tuple[Cause, str]:
    loose_old, loose_new = [loose(message) for message in old], [loose(message) for message in new]
    if loose_new[: len(old)] == loose_old:
        if has_thinking(old[kept]) or has_thinking(new[kept]):
            return Cause.THINKING_STRIPPED, "the agent sends earlier turns back without it"
        if tool_calls_of(old[kept]):
            return Cause.TOOL_JSON, _how_json_differs(old[kept], new[kept])
        return Cause.WHITESPACE, "spaces in an earlier message"
    if kept == len(new):
        return Cause.TRUNCATED, f"the last {len(old) - kept} messages are gone"
    if _is_system(old[kept]) and _is_system(new[kept]) and _shares_rest(loose_old, loose_new, kept):
        return Cause.SYSTEM_CHANGED, "the rest of the history is the same"
    for start in range(kept + 1, len(old)):
        rest = loose_old[start:]
        if loose_new[kept : kept + len(rest)] == rest:
            return Cause.TRUNCATED, f"{start - kept} messages dropped"
    if _is_shortened(old[kept], new[kept]):
        return Cause.TRUNCATED, "a message was shortened"
    said = text_of(new[kept]).lower()
    shares_later = any(message in loose_old[kept:] for message in loose_new[kept:])
    if any(sign in said for sign in _SUMMARY_SIGNS) or (shares_later and len(new) < len(old)):
        return Cause.COMPACTED, f"{len(old)} messages became {len(new)}"
    if shares_later or any(not _is_system(message) for message in old[:kept]):
        return Cause.HISTORY_EDITED, f"message {kept} differs"
    return Cause.OTHER_AGENT, "nothing in common but the system message" if kept else "nothing in common"


def _leading(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages at the start are the same, to the last character."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (one, other) in pairs if not same(one, other)), min(len(old), len(new)))


def _is_system(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _shares_rest(old: Sequence[Any], new: Sequence[Any], kept: int) -> bool:
    rest = old[kept + 1 :]
    return bool(rest) and new[kept + 1 : kept + 1 + len(rest)] == rest


def _is_shortened(old: Message, new: Message) -> bool:
    was, is_now = text_of(old), text_of(new)
    if old.get("role") != new.get("role") or not is_now or len(is_now) >= len(was):
        return False
    half = max(1, len(is_now) // 2)
    return was[:half] == is_now[:half] or was[-half:] == is_now[-half:]
