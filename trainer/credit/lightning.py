"""LightningRL: one group-relative advantage per episode, given to every call of it.

Paper: Agent Lightning (arXiv 2508.03680), section on LightningRL, on top of GRPO (arXiv 2402.03300).

    A_{e,k} = (R_e - mean_g R) / (std_g R + eps)      for each step k of each episode e of group g

`mean_g` and `std_g` run over the group's EPISODES, each counted once however many calls it made.

Departures:
- The paper hands R_e to each call and normalises over calls, so an episode with more calls pulls the baseline
  towards itself. Here the baseline counts episodes.
- eps is 0: a group without variance gets no advantage at all (None with the cause), and any other group has a
  deviation to divide by. `std = "none"` leaves out the division.
- A group of which one episode is left gets no advantage: there is nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..reasons import Reason
from .base import ChoiceKey, Credit, CreditContext, CreditRule, JudgedGroup, same_for_all, set_aside_credits
from .compare import GroupOptions, group_advantages


def broadcast(
    groups: Sequence[JudgedGroup], options: GroupOptions, _: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        advantages = group_advantages(group, options)
        for judged in group.present():
            if isinstance(advantages, Reason):
                credit = Credit(None, advantages)
            else:
                credit = Credit(advantages[judged.episode.id])
            credits |= same_for_all(judged, credit)
    return credits


RULE = CreditRule(
    name="lightning",
    formula="A_e = (R_e - mean_g R) / (std_g R + eps), given to every call of the episode",
    paper="LightningRL, arXiv 2508.03680",
    options=GroupOptions,
    assign=broadcast,
)
