"""What a credit rule takes and gives: judged groups in, an advantage per choice out.

A rule is a pure function. It knows nothing of databases, tensors or tokens, and nothing of why a choice
cannot be trained: it gives credit to every choice, and the plan masks out the excluded ones afterwards, so
that an excluded call keeps its place in the episode and loses only its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...records import Episode

ChoiceKey = tuple[str, int]
"""(call id, choice index)"""


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """An episode and what its rewards come to."""

    episode: Episode
    value: float | None  # the resolved reward; None where there is none
    reward_ids: tuple[str, ...]  # the rows that `value` came from
    set_aside: str | None  # why it takes no part in the baseline; None: it does, and `value` is a number


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    id: str
    task_id: str
    episodes: tuple[JudgedEpisode, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """An advantage, or None with the reason. None (not trained) is not 0.0."""

    advantage: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CreditOptions:
    scale_by_std: bool = True


class CreditRule(Protocol):
    def __call__(self, group: JudgedGroup, options: CreditOptions) -> Mapping[ChoiceKey, Credit]:
        """Credit for every choice of every call of every episode in the group, keyed by ChoiceKey."""
        ...
