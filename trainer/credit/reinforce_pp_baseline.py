"""REINFORCE++ with baseline: the group's mean as the baseline, the whole step's deviation as the scale.

Paper: REINFORCE++ (arXiv 2501.03262), the variant with a group baseline.

    D_e     = R_e - mean_g R
    A_{e,k} = D_e / std_B          std_B^2 = 1/(E-1) sum_{e in B} D_e^2

B: the episodes of the step's groups that have variance, E of them. Their D have mean 0 by construction.

Departures: statistics run over episodes, not tokens; groups without variance and lone survivors get None with
the cause and are left out of B, where the paper's zeros make the others' advantages larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedGroup,
    RuleOptions,
    same_for_all,
    set_aside_credits,
)
from .compare import GroupOptions, group_advantages


class ReinforcePPBaselineOptions(RuleOptions):
    """None."""


def reinforce_pp_baseline(
    groups: Sequence[JudgedGroup], _: ReinforcePPBaselineOptions, __: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    centred: dict[str, float] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        found = group_advantages(group, GroupOptions(std="none"))
        if isinstance(found, Reason):
            for judged in group.present():
                credits |= same_for_all(judged, Credit(None, found))
        else:
            centred |= found
    if not centred:
        return credits
    scale = math.sqrt(math.fsum(number**2 for number in centred.values()) / (len(centred) - 1))
    for judged in (judged for group in groups for judged in group.present()):
        if judged.episode.id in centred:
            credits |= same_for_all(judged, Credit(centred[judged.episode.id] / scale))
    return credits


RULE = CreditRule(
    name="reinforce_pp_baseline",
    formula="A_e = (R_e - mean_g R) / std of these differences over the step",
    paper="REINFORCE++ with baseline, arXiv 2501.03262",
    options=ReinforcePPBaselineOptions,
    assign=reinforce_pp_baseline,
)
