"""GiGPO: the episode's advantage, and beside it one among the steps taken in the same state.

Paper: Group-in-Group Policy Optimization (arXiv 2505.10978).

    r_{e,k}   = reward of call k (0 where there is none), plus R_e on the last step
    A^E_e     = (T_e - mean_g T) / (std_g T + eps)                     T_e = sum_k r_{e,k}, over episodes
    G_{e,k}   = sum_{j>=k} gamma^(j-k) r_{e,j}
    A^S_{e,k} = (G_{e,k} - mean_S G) / (std_S G + eps)                 over the steps of g in the same state S
    A_{e,k}   = A^E_e + omega * A^S_{e,k}

A^S is 0 for a state that was met in one episode only, and where all its G are equal.

Departures:
- A state is its agent too: two roles that read the same text are not compared.
- The paper compares any two steps in one state; here they must come from two episodes at least, because a
  loop within one episode says which visit was later, not which action was better.
- States are equal or they are not: the variant with a text similarity of 0.95 is left out.
- Where the episodes' T are all equal, A^E is 0 and A^S alone decides (shorter ways to the same reward); steps
  for which that is 0 too get None with the group's cause. A lone survivor gets None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from pydantic import Field

from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedEpisode,
    JudgedGroup,
    by_step,
    same_for_all,
    set_aside_credits,
)
from .compare import GroupOptions, all_equal, group_advantages, normalised
from .states import StateOptions, states_of
from .steps import comparable, reads_calls, returns_to_go, step_rewards


class GigpoOptions(StateOptions, GroupOptions):
    """GiGPO's two levels."""

    omega: float = Field(1.0, ge=0, description="Weight of the step's advantage beside the episode's.")


Place = tuple[str, int]
"""(episode id, number of the step)"""


def within_states(
    returns: Mapping[str, Sequence[float]], states: Mapping[str, Sequence[Hashable]], options: GroupOptions
) -> dict[Place, float]:
    """The step's advantage within its state, for steps whose state was met in two episodes at least."""
    met: dict[Hashable, list[Place]] = defaultdict(list)
    for episode in sorted(returns):
        for number, state in enumerate(states[episode]):
            met[state].append((episode, number))
    found: dict[Place, float] = {}
    for places in met.values():
        if len({episode for episode, _ in places}) < 2:
            continue
        values = [returns[episode][number] for episode, number in places]
        advantages = [0.0] * len(values) if all_equal(values) else normalised(values, options)
        found |= dict(zip(places, advantages, strict=True))
    return found


def totals_and_returns(
    present: Sequence[JudgedEpisode], options: StateOptions
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """By episode id: T and the G of its steps."""
    rewards = {judged.episode.id: step_rewards(judged, options) for judged in present}
    return (
        {name: math.fsum(numbers) for name, numbers in rewards.items()},
        {name: returns_to_go(numbers, options.gamma) for name, numbers in rewards.items()},
    )


def gigpo(groups: Sequence[JudgedGroup], options: GigpoOptions, _: CreditContext) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in (comparable(group, options) for group in groups):
        credits |= set_aside_credits(group)
        present = group.present()
        totals, returns = totals_and_returns(present, options)
        of_episode = group_advantages(group, options, totals)
        states = {judged.episode.id: states_of(judged, options.state) for judged in present}
        of_step = within_states(returns, states, options)
        for judged in present:
            if of_episode is Reason.LONE_SURVIVOR:
                credits |= same_for_all(judged, Credit(None, of_episode))
                continue
            name = judged.episode.id
            found = []
            for number in range(len(judged.steps())):
                step = options.omega * of_step.get((name, number), 0.0)
                if not isinstance(of_episode, Reason):
                    found.append(Credit(of_episode[name] + step))
                else:
                    found.append(Credit(step) if step else Credit(None, of_episode))
            credits |= by_step(judged, found)
    return credits


RULE = CreditRule(
    name="gigpo",
    formula="A_k = A_episode + omega A_state: returns-to-go compared among steps in the same state",
    paper="GiGPO, arXiv 2505.10978",
    options=GigpoOptions,
    assign=gigpo,
    reads=reads_calls,
)
