"""MaxRL: the group's mean as baseline and as scale, so that rare successes weigh more.

Source: prime-rl's advantage of that name: with success rates, a gradient of log(mean success) to first order.

    A_{e,k} = (R_e - mean_g R) / mean_g R

Only means something for rewards of 0 and more. A group whose mean is not above 0 though its rewards differ (a
negative one among them) gets None with the reason `mean_not_positive`.

Departures: groups without variance and lone survivors get None with the cause.
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
    value_of,
)
from .compare import mean, why_no_comparison


class MaxRLOptions(RuleOptions):
    """None."""


def maxrl(groups: Sequence[JudgedGroup], _: MaxRLOptions, __: CreditContext) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        present = group.present()
        values = [value_of(judged) for judged in present]
        reason = why_no_comparison(values)
        if reason is None and mean(values) <= 0.0:
            reason = Reason.MEAN_NOT_POSITIVE
        for judged, value in zip(present, values, strict=True):
            if reason is not None:
                credit = Credit(None, reason)
            else:
                credit = Credit((value - mean(values)) / mean(values))
            credits |= same_for_all(judged, credit)
    return credits


RULE = CreditRule(
    name="maxrl",
    formula="A_e = (R_e - mean_g R) / mean_g R, for rewards of 0 and more",
    paper="MaxRL, as in prime-rl",
    options=MaxRLOptions,
    assign=maxrl,
)
