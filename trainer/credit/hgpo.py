"""HGPO: steps compared with those in the same state, the more so the longer their past agrees too.

Paper: Hierarchy-of-Groups Policy Optimization (arXiv 2602.22817).

    r_{e,k}, G_{e,k}: as in gigpo
    C^d_{e,k} = (state of step k, of step k-1, ..., of step k-d)       d = 0 .. depth; "start" before step 0
    A^d_{e,k} = (G_{e,k} - mean G) / (std G + eps)                     over the steps of g with the same C^d
    w_d       = (d + 1)^alpha
    A_{e,k}   = episode_weight * A^E_e + sum_d w_d A^d_{e,k} / sum_d w_d     over the d whose group is kept

A group at depth d is kept where its steps come from two episodes at least; all its G equal: A^d = 0.

Departures:
- States, and the two episodes, as in gigpo.
- A step with no kept group and no `episode_weight` gets None with the reason `no_shared_state`.
- `episode_weight` is ours, 0 by default: it adds gigpo's A^E, for logs in which few states are met twice.
- Where all T are equal, steps whose advantage is 0 get None with the group's cause. A lone
  survivor gets None.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .states import StateOptions, contexts, states_of
from .steps import comparable, reads_calls


class HgpoOptions(StateOptions, GroupOptions):
    """HGPO's hierarchy."""

    depth: int = Field(2, ge=0, description="States of the past that the finest groups agree in (K).")
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
        levels = [
            within_states(returns, {name: contexts(of, depth) for name, of in states.items()}, options)
            for depth in range(options.depth + 1)
        ]
        for judged in present:
            name = judged.episode.id
            episode = 0.0 if isinstance(of_episode, Reason) else options.episode_weight * of_episode[name]
            found = []
            for number in range(len(judged.steps())):
                step = _weighted(levels, (name, number), options.alpha)
                total = episode + (step or 0.0)
                if isinstance(of_episode, Reason) and not total:
                    found.append(Credit(None, of_episode))
                elif step is None and not options.episode_weight:
                    found.append(Credit(None, Reason.NO_SHARED_STATE))
                else:
                    found.append(Credit(total))
            credits |= by_step(judged, found)
    return credits


def _weighted(levels: Sequence[dict[Place, float]], place: Place, alpha: float) -> float | None:
    """None where no depth has a group for the step."""
    kept = [((depth + 1) ** alpha, level[place]) for depth, level in enumerate(levels) if place in level]
    if not kept:
        return None
    total: float = sum(weight * advantage for weight, advantage in kept)
    return total / float(sum(weight for weight, _ in kept))


RULE = CreditRule(
    name="hgpo",
    formula="A_k = sum_d (d+1)^alpha A^d_k / sum_d (d+1)^alpha, over steps that share the last d+1 states",
    paper="HGPO, arXiv 2602.22817",
    options=HgpoOptions,
    assign=hgpo,
    reads=reads_calls,
)
