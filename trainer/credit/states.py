"""Which steps were taken in the same state: what step-level rules compare.

A step's state is its agent and, by the option `state`:

    key      the call's `state_key` as the log has it; where it has none, as with `tokens`
    tokens   a hash of the prompt's new token ids: what follows the longest earlier prompt + answer of the
             episode that this prompt begins with, or the whole prompt where there is none. In a conversation
             that is what was observed since the last answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ...records import Call, TokenIds
from .base import JudgedEpisode
from .steps import StepOptions

State = tuple[str, str]
"""(agent or "", key)"""


class StateOptions(StepOptions):
    """What counts as the same state."""

    state: Literal["key", "tokens"] = Field(
        "key", description="The log's state key, or a hash of the prompt's new tokens."
    )


def states_of(judged: JudgedEpisode, kind: Literal["key", "tokens"]) -> list[State]:
    """One per step, in order."""
    steps = judged.steps()
    found: list[State] = []
    for number, call in enumerate(steps):
        key = call.state_key if kind == "key" else None
        found.append((call.agent or "", _observed(call, steps[:number]) if key is None else key))
    return found


def contexts(states: Sequence[State], depth: int) -> list[tuple[State | None, ...]]:
    """Each step's state with the `depth` before it, newest first; None stands before the first step."""
    return [
        tuple(states[number - back] if number >= back else None for back in range(depth + 1))
        for number in range(len(states))
    ]


def _observed(call: Call, earlier: Sequence[Call]) -> str:
    new = call.prompt_ids[_longest_beginning(call.prompt_ids, earlier) :]
    return hashlib.blake2b(new.tobytes(), digest_size=16).hexdigest()


def _longest_beginning(prompt: TokenIds, earlier: Sequence[Call]) -> int:
    """Length of the longest earlier prompt + answer that the prompt begins with; 0 where none does."""
    best = 0
    for call in earlier:
        for choice in call.choices:
            length = len(call.prompt_ids) + len(choice.completion_ids)
            if best < length <= len(prompt) and prompt[:length] == call.prompt_ids + choice.completion_ids:
                best = length
    return best
