"""Step-level GAE: temporal differences over calls, with a critic's value at each call's last prompt token.

Papers: StepPO (arXiv 2604.18401), Turn-PPO (arXiv 2512.17008); GAE is arXiv 1506.02438.

    r_{e,k}     = reward of call k (0 where there is none), plus R_e on the last step
    delta_{e,k} = r_{e,k} + gamma V(s_{e,k+1}) - V(s_{e,k})          V after the last step is 0
    B_{e,k}     = sum_{j>=k} (gamma lam)^(j-k) delta_{e,j}
    A_{e,k}     = (B_{e,k} - mean B) / std B                         over all steps of all episodes (`whiten`)

`whiten`: "calls" counts each step once, as in StepPO; "episodes" lets each episode's steps together weigh
one (`compare.shared_deviation`); "none" gives B itself. The critic learns B + V (`value_targets`).

The values are an input: whoever owns the critic fills `CreditContext.values`; without any the rule refuses.

Departures:
- A step whose value is missing (its prompt is not in the log) is passed through: its delta is 0, it gets None
  with the reason `no_value`, and the steps before it see past it.
- Whitening takes the sample deviation and no epsilon; steps whose B are all equal get None with the cause.
- Compared with the critic, an episode needs no sibling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ...errors import UserError
from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedEpisode,
    JudgedGroup,
    Reads,
    Values,
    by_step,
    set_aside_credits,
)
from .compare import all_equal, deviation, mean, shared_deviation
from .steps import StepOptions, comparable, step_rewards


class StepGaeOptions(StepOptions):
    """GAE's two numbers, and the scale."""

    gamma: float = Field(0.99, gt=0, le=1, description="Discount per call.")
    lam: float = Field(0.9, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the rewards.")
    whiten: Literal["calls", "episodes", "none"] = Field("calls", description="What the scale counts.")


def gae(
    rewards: Sequence[float], values: Sequence[float | None], *, gamma: float, lam: float
) -> list[float | None]:
    """B of each step; None where its value is."""
    found: list[float | None] = []
    following_value = following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        if value is None:
            following_value = reward + gamma * following_value  # delta 0: as if the critic had known
            following *= gamma * lam
            found.append(None)
            continue
        delta = reward + gamma * following_value - value
        following = delta + gamma * lam * following
        following_value = value
        found.append(following)
    return found[::-1]


def advantages_of(judged: JudgedEpisode, options: StepGaeOptions, values: Values) -> list[float | None]:
    """B of each step of an episode that takes part, before whitening."""
    steps = judged.steps()
    if not steps:
        return []
    known = [values.get(call.id) for call in steps]
    return gae(step_rewards(judged, options), known, gamma=options.gamma, lam=options.lam)


def value_targets(judged: JudgedEpisode, options: StepGaeOptions, values: Values) -> dict[str, float]:
    """What the critic should have said, by call id: B + V."""
    found: dict[str, float] = {}
    for call, advantage in zip(judged.steps(), advantages_of(judged, options, values), strict=True):
        value = values.get(call.id)
        if advantage is not None and value is not None:
            found[call.id] = advantage + value
    return found


def step_gae(
    groups: Sequence[JudgedGroup], options: StepGaeOptions, context: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    groups = [comparable(group, options) for group in groups]
    for group in groups:
        credits |= set_aside_credits(group)
    present = sorted((e for group in groups for e in group.present()), key=lambda judged: judged.episode.id)
    raw = [advantages_of(judged, options, context.values) for judged in present]
    known = [[number for number in numbers if number is not None] for numbers in raw]
    known = [numbers for numbers in known if numbers]
    if any(raw) and not known:
        raise UserError("the credit rule step_gae needs a critic's values, and this run has no critic")
    middle, scale, reason = _scale(known, options.whiten)
    for judged, numbers in zip(present, raw, strict=True):
        found = []
        for number in numbers:
            if number is None:
                found.append(Credit(None, Reason.NO_VALUE))
            elif reason is not None:
                found.append(Credit(None, reason))
            else:
                found.append(Credit((number - middle) / scale))
        credits |= by_step(judged, found)
    return credits


def _scale(known: Sequence[Sequence[float]], whiten: str) -> tuple[float, float, Reason | None]:
    numbers = [number for of_episode in known for number in of_episode]
    if whiten == "none" or not numbers:
        return 0.0, 1.0, None
    few = len(known) if whiten == "episodes" else len(numbers)
    if few < 2:
        return 0.0, 1.0, Reason.LONE_SURVIVOR
    if all_equal(numbers):
        return 0.0, 1.0, Reason.EQUAL_ADVANTAGES
    if whiten == "episodes":
        return *shared_deviation(known), None
    return mean(numbers), deviation(numbers), None


def _reads(options: StepGaeOptions) -> frozenset[Reads]:
    return frozenset({"values", "calls"}) if options.call_rewards else frozenset({"values"})


def targets_of_group(group: JudgedGroup, options: StepGaeOptions, values: Values) -> dict[str, float]:
    """`value_targets` of every episode of the group that takes part."""
    found: dict[str, float] = {}
    for judged in comparable(group, options).present():
        found |= value_targets(judged, options, values)
    return found


RULE = CreditRule(
    name="step_gae",
    formula="A_k = whitened sum_j (gamma lam)^(j-k) delta_j, delta_k = r_k + gamma V(s_k+1) - V(s_k)",
    paper="StepPO, arXiv 2604.18401; Turn-PPO, arXiv 2512.17008",
    options=StepGaeOptions,
    assign=step_gae,
    reads=_reads,
    fewest_episodes=1,
    targets=targets_of_group,
)
