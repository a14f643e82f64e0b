"""LightningRL: one group-relative advantage per episode, given to every call of it.

Paper: Agent Lightning (arXiv 2508.03680), section on LightningRL, on top of GRPO (arXiv 2402.03300).

    A_e = (R_e - mean_g R) / std_g R        for each episode e of group g
    A_{e,k,c} = A_e                         for each call k of e and each choice c of it

`mean_g` and `std_g` run over the group's EPISODES, each counted once however many calls it made. `std` is the
sample standard deviation (n - 1), as in TRL and verl.

Departures:
- The paper hands R_e to each call and normalises over calls, so an episode with more calls pulls the baseline
  towards itself. Here the baseline counts episodes.
- No epsilon in the denominator: a group without variance gets no advantage at all (None with the cause), and
any
  other group has a standard deviation to divide by.
- A group of which one episode is left gets no advantage: there is nothing to compare it with.
- `scale_by_std=False` leaves out the division (Dr. GRPO, arXiv 2503.20783).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..reasons import Reason
from .base import ChoiceKey, Credit, CreditOptions, JudgedEpisode, JudgedGroup

_EQUAL_WITHIN = 1e-9
"""Rewards that differ by less than this, relative to their size, are one reward averaged in another order."""


def lightning(group: JudgedGroup, options: CreditOptions) -> dict[ChoiceKey, Credit]:
    """Credit for every choice of the group; see the module's docstring for the formula."""
    values = {judged.episode.id: judged.value for judged in group.episodes if judged.set_aside is None}
    numbers = [value for value in values.values() if value is not None]
    assert len(numbers) == len(values), "an episode that takes part has a value"
    reason = group_reason(numbers)
    credits: dict[ChoiceKey, Credit] = {}
    for judged in group.episodes:
        if judged.set_aside is not None:
            credit = Credit(None, judged.set_aside)
        elif reason is not None:
            credit = Credit(None, reason)
        else:
            value = values[judged.episode.id]
            assert value is not None
            credit = Credit(_advantage(value, numbers, options))
        credits |= dict.fromkeys(_choices_of(judged), credit)
    return credits


def group_reason(values: Sequence[float]) -> Reason | None:
    """Why these rewards give nobody an advantage, or None where they do.

    A reward of 1 or more counts as solved and one of 0 or less as failed; the words only name the cause.
    """
    if len(values) < 2:
        return Reason.LONE_SURVIVOR
    low, high = min(values), max(values)
    if high - low > _EQUAL_WITHIN * max(1.0, abs(low), abs(high)):
        return None
    if low >= 1.0:
        return Reason.ALL_SOLVED
    return Reason.ALL_FAILED if high <= 0.0 else Reason.EQUAL_REWARDS


def _advantage(value: float, values: Sequence[float], options: CreditOptions) -> float:
    centred = value - statistics.fmean(values)
    return centred / statistics.stdev(values) if options.scale_by_std else centred


def _choices_of(judged: JudgedEpisode) -> list[ChoiceKey]:
    return [(call.id, choice.index) for call in judged.episode.calls for choice in call.choices]
