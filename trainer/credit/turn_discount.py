"""Turn discount: the group-relative advantage, smaller for calls further from the episode's end.

Source: AReaL's turn-level discount of the reward.

    A_{e,k} = gamma^(K_e - 1 - k) * (R_e - mean_g R) / (std_g R + eps)      k = 0 .. K_e - 1

k counts the episode's steps, K_e is their number; excluded calls keep their k.

Departures: AReaL discounts the reward and normalises afterwards, over calls; here the baseline counts
episodes, so the advantage is discounted instead. The two agree where the baseline is 0.
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


class TurnDiscountOptions(GroupOptions):
    """How fast credit fades towards the episode's beginning."""

    gamma: float = Field(0.9, gt=0, le=1, description="Discount per call, counted back from the last.")


def turn_discount(
    groups: Sequence[JudgedGroup], options: TurnDiscountOptions, _: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        advantages = group_advantages(group, options)
        for judged in group.present():
            if isinstance(advantages, Reason):
                credits |= same_for_all(judged, Credit(None, advantages))
                continue
            whole = advantages[judged.episode.id]
            last = len(judged.steps()) - 1
            credits |= by_step(judged, [Credit(whole * options.gamma ** (last - k)) for k in range(last + 1)])
    return credits


RULE = CreditRule(
    name="turn_discount",
    formula="A_k = gamma^(K-1-k) (R_e - mean_g R) / (std_g R + eps)",
    paper="turn discount, as in AReaL (arXiv 2505.24298)",
    options=TurnDiscountOptions,
    assign=turn_discount,
)
