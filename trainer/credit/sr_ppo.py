"""SR-PPO: one episode per task, and a critic that says how likely success is; credit is how a call moved it.

Paper: SR-PPO (arXiv 2606.25451), for traffic in which no task is played twice. The critic's value is a
probability, p_k = V(s_k) = Pass@1 from the prompt of call k on, learnt from outcomes in [0, 1] (`critic_loss
= "bce"`).

    P_k   = 1 - (1 - p_k)^n                                    Pass@n; after the last step: R_e
    A_e,k = P_{k+1} - P_k                                      for each step k of e

`n = 1` credits the change of the success probability itself; a larger n cares less about calls from which
some of n attempts would succeed anyhow. The A of an episode add up to R_e - P_0.

Departures:
- The paper changes credit along the tokens of one long answer; here the steps are the calls of an episode.
- A step whose value is missing is passed through: its change falls to the step before it, and it gets None
  with the reason `no_value`.
- Nothing is whitened: the numbers are differences of probabilities already.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    RuleOptions,
    Values,
    by_step,
    set_aside_credits,
    value_of,
)


class SrPpoOptions(RuleOptions):
    """How many attempts the credit thinks of."""

    n: int = Field(1, ge=1, description="Attempts of Pass@n.")


def pass_at(probability: float, n: int) -> float:
    return 1.0 - (1.0 - probability) ** n


def changes(values: Sequence[float | None], outcome: float, n: int) -> list[float | None]:
    """A of each step; None where its value is."""
    found: list[float | None] = []
    following = outcome
    for value in reversed(values):
        if value is None:
            found.append(None)
            continue
        now = pass_at(value, n)
        found.append(following - now)
        following = now
    return found[::-1]


def sr_ppo(
    groups: Sequence[JudgedGroup], options: SrPpoOptions, context: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    num_known = num_steps = 0
    for group in groups:
        credits |= set_aside_credits(group)
        for judged in group.present():
            values = [context.values.get(call.id) for call in judged.steps()]
            num_steps += len(values)
            num_known += sum(value is not None for value in values)
            found = [
                Credit(None, Reason.NO_VALUE) if change is None else Credit(change)
                for change in changes(_probabilities(values), _outcome(judged), options.n)
            ]
            credits |= by_step(judged, found)
    if num_steps and not num_known:
        raise UserError("the credit rule sr_ppo needs a critic's values, and this run has no critic")
    return credits


def targets_of_group(group: JudgedGroup, options: SrPpoOptions, values: Values) -> dict[str, float]:
    """The outcome itself, for every step whose prompt the critic knows."""
    return {
        call.id: _outcome(judged)
        for judged in group.present()
        for call in judged.steps()
        if values.get(call.id) is not None
    }


def _probabilities(values: Sequence[float | None]) -> Sequence[float | None]:
    for value in values:
        if value is not None and not 0.0 <= value <= 1.0:
            raise UserError(
                f"the credit rule sr_ppo needs probabilities, and the critic said {value:.3g}: "
                'set critic_loss = "bce"'
            )
    return values


def _outcome(judged: JudgedEpisode) -> float:
    value = value_of(judged)
    if not 0.0 <= value <= 1.0:
        raise UserError(
            f"the credit rule sr_ppo needs outcomes between 0 and 1, and episode {judged.episode.id} has "
            f"{value:g}; scale the rewards or choose another rule"
        )
    return value


RULE = CreditRule(
    name="sr_ppo",
    formula="A_k = P_k+1 - P_k, P_k = 1 - (1 - V(s_k))^n, P after the last step = R",
    paper="SR-PPO, arXiv 2606.25451",
    options=SrPpoOptions,
    assign=sr_ppo,
    reads=lambda _: frozenset({"values"}),
    fewest_episodes=1,
    targets=targets_of_group,
)
