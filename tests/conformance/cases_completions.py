"""The older completions API, and what can't be recorded on either."""

from __future__ import annotations

from typing import Any

from lightning_rl.tests.conformance.case import (
    ADDS_COMPLETION,
    COMPLETIONS,
    Case,
    body_of,
    completed,
    prompt_of,
    replies_with,
)
from lightning_rl.tests.conformance.cases_chat import LONG, ONE_TOOL, PLAIN, THREE, TOOL, UNICODE
from lightning_rl.tests.conformance.vllm_forms import Script, Step, interleaved, words
from lightning_rl.tests.conformance.wire import Question

STOP = Script((*words("a b", finish=None), Step(((9, -0.5, " c"),), {}, "stop", "c")))
TWO = Script(interleaved(words("x y"), words("z", 2000, 1)))


def completion_cases() -> list[Case]:
    shapes: dict[str, tuple[Script, dict[str, Any], Any]] = {
        "plain": (PLAIN, {}, None),
        "unicode": (UNICODE, {}, None),
        "n2": (TWO, {"n": 2}, None),
        "n3": (THREE, {"n": 3}, None),
        "stop": (STOP, {"stop": "c"}, None),
        "long": (LONG, {}, None),
        "own-logprobs": (PLAIN, {"logprobs": 2}, ADDS_COMPLETION[:1]),
        "own-zero-logprobs": (PLAIN, {"logprobs": 0}, ADDS_COMPLETION[:1]),
        "own-ids": (PLAIN, {"return_token_ids": True}, ADDS_COMPLETION[1:]),
        "prompt-of-ids": (PLAIN, {"prompt": [1, 2, 3]}, None),
        "one-prompt-in-a-list": (PLAIN, {"prompt": ["hi"]}, None),
    }
    cases = []
    for name, (script, members, adds) in shapes.items():
        cases.append(completed(f"completion-{name}", script, adds=adds, **members))
        cases.append(completed(f"completion-stream-{name}", script, adds=adds, stream=True, **members))
    for name, options in (
        ("usage", {"include_usage": True}),
        ("usage-everywhere", {"include_usage": True, "continuous_usage_stats": True}),
    ):
        cases.append(completed(f"completion-stream-{name}", TWO, n=2, stream=True, stream_options=options))
    return cases


def declared_cases() -> list[Case]:
    """Every reason of docs/recording.md: the call passes untouched and is in the log as what it is."""
    chat: dict[str, tuple[str, dict[str, Any]]] = {
        "echo": ("echo", {"echo": True, "add_generation_prompt": False}),
        "no-reasoning": ("include_reasoning=false", {"include_reasoning": False}),
        "top-logprobs": ("top_logprobs without logprobs", {"top_logprobs": 2}),
        "logprob-ids": ("logprob_token_ids without logprobs", {"logprob_token_ids": [1]}),
        "logprobs-type": ("logprobs is neither true nor false", {"logprobs": "yes"}),
        "ids-type": ("return_token_ids is neither true nor false", {"return_token_ids": "yes"}),
        "beams": ("use_beam_search", {"use_beam_search": True}),
        "one-tool-call": (
            "parallel_tool_calls=false in a stream",
            {"stream": True, "tools": [TOOL], "parallel_tool_calls": False},
        ),
    }
    cases = [
        Case(
            f"declared-{name}",
            (Question(pieces=(body_of(**members),)),),
            replies_with(ONE_TOOL if "tools" in members else PLAIN),
            declared=reason,
        )
        for name, (reason, members) in chat.items()
    ]
    completions: dict[str, tuple[str, dict[str, Any]]] = {
        "completion-echo": ("echo", {"echo": True}),
        "several-prompts": ("several prompts in one request", {"prompt": ["a", "b"]}),
        "logprobs-not-a-count": ("logprobs is not an integer", {"logprobs": True}),
        "prompt-embeds": ("prompt_embeds", {"prompt_embeds": "AAAA", "prompt": None}),
    }
    cases += [
        Case(
            f"declared-{name}",
            (Question(target=COMPLETIONS, pieces=(prompt_of(**members),)),),
            replies_with(PLAIN, target=COMPLETIONS),
            declared=reason,
        )
        for name, (reason, members) in completions.items()
    ]
    return cases
