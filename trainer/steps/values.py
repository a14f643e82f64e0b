"""A critic's part in a run: what a step's calls are worth, asked before the step is planned, and what the
critic learns from it afterwards.

Knows which calls have a value (steps of an episode whose prompt is in the log); the network is critic.py's,
the formulas are the credit rules'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...records import CallKind, Group, TokenIds

CRITIC_FILE = "critic.pt"
"""What a critic is saved as, in a run folder and in its checkpoints."""


class Measured(Protocol):
    """What is reported of one fit."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def explained_variance(self) -> float | None: ...
    @property
    def value_mean(self) -> float: ...


class Valuer(Protocol):
    """What a run needs of critic.Critic."""

    def values(self, prompts: Sequence[TokenIds]) -> list[float]: ...
    def fit(
        self, prompts: Sequence[TokenIds], returns: Sequence[float], old: Sequence[float]
    ) -> Measured: ...


class Teacher(Protocol):
    """What a run needs of planning.Planner."""

    def value_targets(self, groups: Sequence[Group], values: Mapping[str, float]) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class StepValues:
    """Of one step: the prompts that have a value, and what the critic said of them, by call id."""

    prompts: Mapping[str, TokenIds]
    values: Mapping[str, float]

    @classmethod
    def of(cls, groups: Sequence[Group], critic: Valuer, max_tokens: int | None = None) -> StepValues:
        """A prompt of more than `max_tokens` has no value: the critic reads it no more than the policy
        does."""
        prompts = {
            call.id: call.prompt_ids
            for group in groups
            for episode in group.episodes
            for call in episode.calls
            if call.kind is CallKind.POLICY and 0 < len(call.prompt_ids) <= (max_tokens or math.inf)
        }
        return cls(prompts, dict(zip(prompts, critic.values(list(prompts.values())), strict=True)))

    def teach(self, critic: Valuer, teacher: Teacher, groups: Sequence[Group]) -> Measured | None:
        """One fit on what the step's rewards say. None where they say nothing of any call."""
        targets = teacher.value_targets(groups, self.values)
        if not targets:
            return None
        return critic.fit(
            [self.prompts[name] for name in targets],
            list(targets.values()),
            [self.values[name] for name in targets],
        )
