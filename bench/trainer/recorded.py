"""Synthetic transitions in the shapes that agents' episodes have, of random token ids.

Groups of 8 siblings; each call's prompt is the one before it, its answer, and an observation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rl.records import Transition, logprobs, token_ids

SIBLINGS = 8
SAMPLED, OBSERVED = 40, 60


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of traffic, and what its key in the last line is called."""

    name: str
    transitions: tuple[Transition, ...]

    @property
    def call_tokens(self) -> int:
        return sum(len(t.prompt_ids) + len(t.completion_ids) for t in self.transitions)


class Writer:
    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._num_calls = 0

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(count)]

    def call(self, prompt: Sequence[int], completion: Sequence[int]) -> Transition:
        self._num_calls += 1
        return Transition(
            f"c{self._num_calls:05d}",
            0,
            token_ids(prompt),
            token_ids(completion),
            logprobs([-self._random.uniform(8.5, 9.5) for _ in completion]),
            1.0,
            self._random.choice((-1.0, 1.0)),
            1e-4,
        )


def append_only(num_calls: int, *, vocabulary: int, prompt_tokens: int = 300, seed: int = 0) -> Case:
    """The plain agent loop."""
    write = Writer(vocabulary, seed)
    found = []
    shared = write.ids(prompt_tokens)
    for _ in range(SIBLINGS):
        prompt = list(shared)
        for _ in range(num_calls):
            completion = write.ids(SAMPLED)
            found.append(write.call(prompt, completion))
            prompt = prompt + completion + write.ids(OBSERVED)
    return Case(f"{num_calls} calls", tuple(found))


def long_shared_prompt(*, vocabulary: int, seed: int = 0) -> Case:
    """2,000 tokens of instructions and tools, then two short calls."""
    made = append_only(2, vocabulary=vocabulary, prompt_tokens=2000, seed=seed)
    return Case("long shared prompt", made.transitions)


def smallest(*, vocabulary: int, seed: int = 0) -> Case:
    """For the test of the bench itself."""
    made = append_only(2, vocabulary=vocabulary, prompt_tokens=20, seed=seed)
    return Case("smallest", made.transitions[:6])


def forked(*, vocabulary: int, seed: int = 0) -> Case:
    """A planner whose sub-agents start from its context so far: three forks of three calls each."""
    write = Writer(vocabulary, seed)
    found = []
    shared = write.ids(300)
    for _ in range(SIBLINGS):
        prompt = list(shared)
        for _ in range(3):
            completion = write.ids(SAMPLED)
            found.append(write.call(prompt, completion))
            fork = prompt + completion + write.ids(OBSERVED)
            for _ in range(3):
                answer = write.ids(SAMPLED)
                found.append(write.call(fork, answer))
                fork = fork + answer + write.ids(OBSERVED)
            prompt = prompt + completion + write.ids(SAMPLED)  # the sub-agent's result comes back
    return Case("forked", tuple(found))
