"""Dr. GRPO: the group's mean as the baseline, and no division.

Paper: Understanding R1-Zero-like training (arXiv 2503.20783).

    A_{e,k} = R_e - mean_g R

The paper's other half, dividing the loss by a constant instead of by lengths, is a weighting and no credit:
`weighting = "constant"`.

Departures: groups without variance and lone survivors get None with the cause, where the paper gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import ChoiceKey, Credit, CreditContext, CreditRule, JudgedGroup, RuleOptions
from .compare import GroupOptions
from .lightning import broadcast


class DrGrpoOptions(RuleOptions):
    """None."""


def dr_grpo(
    groups: Sequence[JudgedGroup], _: DrGrpoOptions, context: CreditContext
) -> dict[ChoiceKey, Credit]:
    return broadcast(groups, GroupOptions(std="none"), context)


RULE = CreditRule(
    name="dr_grpo",
    formula="A_e = R_e - mean_g R",
    paper="Dr. GRPO, arXiv 2503.20783",
    options=DrGrpoOptions,
    assign=dr_grpo,
)
