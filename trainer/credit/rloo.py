"""RLOO: each episode against the mean of the others.

Paper: Back to basics (arXiv 2402.14740), after Kool et al. 2019.

    A_{e,k} = R_e - mean of R over the group's OTHER episodes = n / (n - 1) * (R_e - mean_g R)

n: episodes of the group that take part.

Departures: groups without variance get None with the cause, where the paper gives 0.
"""

from __future__ import annotations

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


class RlooOptions(RuleOptions):
    """None."""


def rloo(groups: Sequence[JudgedGroup], _: RlooOptions, __: CreditContext) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        present = group.present()
        centred = group_advantages(group, GroupOptions(std="none"))
        for judged in present:
            if isinstance(centred, Reason):
                credit = Credit(None, centred)
            else:
                credit = Credit(centred[judged.episode.id] * len(present) / (len(present) - 1))
            credits |= same_for_all(judged, credit)
    return credits


RULE = CreditRule(
    name="rloo",
    formula="A_e = R_e - mean of the other episodes' R",
    paper="RLOO, arXiv 2402.14740",
    options=RlooOptions,
    assign=rloo,
)
