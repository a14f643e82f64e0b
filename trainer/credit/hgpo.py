"""HGPO: steps compared with those in the same state, the more so the longer their past agrees too.

Paper: Hierarchy-of-Groups Policy Optimization (arXiv 2602.22817).

    r_{e,k}, G_{e,k}: as in gigpo
    C^d_{e,k} = (state of step k, of step k-1, ..., of step k-d)       d = 0 .. depth; "start" before step 0
    A^d_{e,k} = (G_{e,k} - mean G) / (std G + eps)                     over the steps of g with the same C^d
    w_d       = (d + 1)^alpha
    A_{e,k}   = episode_weight * A^E_e + sum_d w_d A^d_{e,k} / sum_d w_d     over the d whose group is kept

A group at depth d is kept where its steps come from two episodes at least; all its G equal: A^d = 0. From the
longest episode's first step on no depth can tell steps apart that the one before could not: the levels end
there, and the last one weighs for all that would follow.

Departures:
- States, and the two episodes, as in gigpo.
- A step with no kept group and no `episode_weight` gets None with the reason `no_shared_state`.
- `episode_weight` is ours, 0 by default: it adds gigpo's A^E, for logs in which few states are met twice.
- Where all T are equal, steps whose advantage is 0 get None with the group's cause. A lone
  survivor gets None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedGroup,
    by_step,
    same_for_all,
    set_aside_credits,
)
from .compare import GroupOptions, group_advantages
from .gigpo import Place, totals_and_returns, within_states
from .states import State, StateOptions, contexts, states_of
from .steps import comparable, reads_calls

MOST_DEPTH = 100_000
"""Calls of an episode that nobody has seen; the sum of weights is still taken in no time."""


class HgpoOptions(StateOptions, GroupOptions):
    """HGPO's hierarchy."""

    depth: int = Field(
        2, ge=0, le=MOST_DEPTH, description="States of the past that the finest groups agree in (K)."
    )
    alpha: float = Field(1.0, ge=0, description="How much more finer groups weigh: (d + 1) ^ alpha.")
    episode_weight: float = Field(0.0, ge=0, description="Weight of the episode's own advantage.")


def hgpo(groups: Sequence[JudgedGroup], options: HgpoOptions, _: CreditContext) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in (comparable(group, options) for group in groups):
        credits |= set_aside_credits(group)
        present = group.present()
        totals, returns = totals_and_returns(present, options)
        of_episode = group_advantages(group, options, totals)
        if of_episode is Reason.LONE_SURVIVOR:
            for judged in present:
                credits |= same_for_all(judged, Credit(None, of_episode))
            continue
        states = {judged.episode.id: states_of(judged, options.state) for judged in present}
        levels = _Levels.of(returns, states, options)
        for judged in present:
            name = judged.episode.id
            episode = 0.0 if isinstance(of_episode, Reason) else options.episode_weight * of_episode[name]
            found = []
            for number in range(len(judged.steps())):
                step = levels.weighted((name, number))
                total = episode + (step or 0.0)
                if isinstance(of_episode, Reason) and not total:
                    found.append(Credit(None, of_episode))
                elif step is None and not options.episode_weight:
                    found.append(Credit(None, Reason.NO_SHARED_STATE))
                else:
                    found.append(Credit(total))
            credits |= by_step(judged, found)
    return credits


@dataclass(frozen=True, slots=True)
class _Levels:
    """A^d by depth. A step has one at every depth up to its deepest: finer groups are parts of coarser."""

    levels: Sequence[Mapping[Place, float]]
    last: int  # the depth from which on every level is the same
    options: HgpoOptions
    _weights: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        returns: Mapping[str, Sequence[float]],
        states: Mapping[str, Sequence[State]],
        options: HgpoOptions,
    ) -> _Levels:
        longest = max((len(of) for of in states.values()), default=0)
        last = min(options.depth, max(longest - 1, 0))
        levels: list[Mapping[Place, float]] = []
        for depth in range(last + 1):
            known = {name: contexts(of, depth) for name, of in states.items()}
            level = within_states(returns, known, options)
            if not level:
                break
            levels.append(level)
        return cls(levels, last, options)

    def weighted(self, place: Place) -> float | None:
        """None where no depth has a group for the step."""
        kept = [level[place] for level in self.levels if place in level]
        if not kept:
            return None
        weights = self._of_depths(len(kept) - 1)
        total = math.fsum(weight * advantage for weight, advantage in zip(weights, kept, strict=True))
        return total / math.fsum(weights)

    def _of_depths(self, deepest: int) -> list[float]:
        """w_0 .. w_deepest over the largest of them: none overflows, and their quotients stay."""
        if deepest not in self._weights:
            largest = self.options.depth if deepest == self.last else deepest
            weights = [((d + 1) / (largest + 1)) ** self.options.alpha for d in range(largest + 1)]
            self._weights[deepest] = [*weights[:deepest], math.fsum(weights[deepest:])]
        return self._weights[deepest]


RULE = CreditRule(
    name="hgpo",
    formula="A_k = sum_d (d+1)^alpha A^d_k / sum_d (d+1)^alpha, over steps that share the last d+1 states",
    paper="HGPO, arXiv 2602.22817",
    options=HgpoOptions,
    assign=hgpo,
    reads=reads_calls,
)
