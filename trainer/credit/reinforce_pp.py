"""REINFORCE++: returns whitened over the whole step, with no group.

Paper: REINFORCE++ (arXiv 2501.03262).

    G_{e,k} = gamma^(K_e - 1 - k) R_e
    A_{e,k} = (G_{e,k} - mean_B G) / std_B G        B: all episodes of the step that take part

with mean_B and std_B in which each EPISODE weighs one (`compare.shared_deviation`):

    mean_B = 1/E sum_e 1/K_e sum_k G_{e,k}        std_B^2 = 1/(E-1) sum_e 1/K_e sum_k (G_{e,k} - mean_B)^2

The comparison is with the step's other tasks: an episode needs no sibling, and one that is the last of its
group is compared like any other. Hard tasks are pushed down and easy ones up, which
`reinforce_pp_baseline` does not do.

Departures: the paper's KL term in the reward is the objective's matter here; statistics run over episodes,
not tokens; an episode without a single step counts with R_e.
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
    RuleOptions,
    by_step,
    same_for_all,
    set_aside_credits,
    value_of,
)
from .compare import shared_deviation, why_no_comparison
from .steps import returns_to_go


class ReinforcePPOptions(RuleOptions):
    """How returns fade."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount per call, counted back from the last.")


def reinforce_pp(
    groups: Sequence[JudgedGroup], options: ReinforcePPOptions, _: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
    present = sorted((e for group in groups for e in group.present()), key=lambda judged: judged.episode.id)
    if not present:
        return credits
    returns = []
    for judged in present:
        rewards = [0.0] * (max(1, len(judged.steps())) - 1) + [value_of(judged)]
        returns.append(returns_to_go(rewards, options.gamma))
    if len(present) < 2:
        reason: Reason | None = Reason.LONE_SURVIVOR
    else:
        reason = why_no_comparison([number for numbers in returns for number in numbers])
    middle, scale = (0.0, 1.0) if reason else shared_deviation(returns)
    for judged, numbers in zip(present, returns, strict=True):
        if reason is not None:
            credits |= same_for_all(judged, Credit(None, reason))
        else:
            steps = numbers[: len(judged.steps())]
            credits |= by_step(judged, [Credit((number - middle) / scale) for number in steps])
    return credits


RULE = CreditRule(
    name="reinforce_pp",
    formula="A_k = (gamma^(K-1-k) R_e - mean_step) / std_step, over all episodes of the step",
    paper="REINFORCE++, arXiv 2501.03262",
    options=ReinforcePPOptions,
    assign=reinforce_pp,
    fewest_episodes=1,
)
