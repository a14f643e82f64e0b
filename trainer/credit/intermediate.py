"""Intermediate rewards: each call by what came after it, compared within the group.

No paper: returns-to-go with a group baseline, as REINFORCE has it, counted over episodes.

    r_{e,k} = reward of call k (0 where there is none), plus R_e on the last step
    G_{e,k} = sum_{j>=k} gamma^(j-k) r_{e,j}
    A_{e,k} = (G_{e,k} - mean G) / (std G + eps)

Over what mean and std run is the option `compare`:

    position   over the G_{.,k} of the group's episodes that have a step k: each episode once. A step that
               only one episode has gets None with the reason `no_sibling_step`; where all are equal, None
               with `no_variance:equal_advantages`.
    group      over all G of the group, each EPISODE's together weighing one (`compare.shared_deviation`;
               "sample" and "population" divide by E - 1 and E). All equal: None with the group's cause.

An episode needs a value of its own beside its calls' (`unrewarded = "fill=0"` where only calls are rewarded).
A lone survivor gets None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedEpisode,
    JudgedGroup,
    by_step,
    same_for_all,
    set_aside_credits,
)
from .compare import GroupOptions, all_equal, normalised, shared_deviation, why_no_comparison
from .steps import StepOptions, comparable, reads_calls, returns_to_go, step_rewards


class IntermediateOptions(StepOptions, GroupOptions):
    """What returns are compared with."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount per call.")
    compare: Literal["position", "group"] = Field(
        "position", description="With the siblings' returns at the same step, or with all of the group's."
    )


def intermediate(
    groups: Sequence[JudgedGroup], options: IntermediateOptions, _: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in (comparable(group, options) for group in groups):
        credits |= set_aside_credits(group)
        present = group.present()
        if len(present) < 2:
            for judged in present:
                credits |= same_for_all(judged, Credit(None, Reason.LONE_SURVIVOR))
            continue
        returns = {e.episode.id: returns_to_go(step_rewards(e, options), options.gamma) for e in present}
        compared = _by_position if options.compare == "position" else _over_group
        credits |= compared(present, returns, options)
    return credits


def _by_position(
    present: Sequence[JudgedEpisode], returns: Mapping[str, Sequence[float]], options: IntermediateOptions
) -> dict[ChoiceKey, Credit]:
    found: dict[str, list[Credit]] = {judged.episode.id: [] for judged in present}
    num_steps = {judged.episode.id: len(judged.steps()) for judged in present}
    for number in range(max(num_steps.values())):
        here = [name for name in found if num_steps[name] > number]
        values = [returns[name][number] for name in here]
        if len(values) < 2:
            made = [Credit(None, Reason.NO_SIBLING_STEP)] * len(values)
        elif all_equal(values):
            made = [Credit(None, Reason.EQUAL_ADVANTAGES)] * len(values)
        else:
            made = [Credit(advantage) for advantage in normalised(values, options)]
        for name, credit in zip(here, made, strict=True):
            found[name].append(credit)
    credits: dict[ChoiceKey, Credit] = {}
    for judged in present:
        credits |= by_step(judged, found[judged.episode.id])
    return credits


def _over_group(
    present: Sequence[JudgedEpisode], returns: Mapping[str, Sequence[float]], options: IntermediateOptions
) -> dict[ChoiceKey, Credit]:
    listed = [returns[judged.episode.id] for judged in present]
    reason = why_no_comparison([number for numbers in listed for number in numbers])
    credits: dict[ChoiceKey, Credit] = {}
    if reason is not None:
        for judged in present:
            credits |= same_for_all(judged, Credit(None, reason))
        return credits
    middle, scale = shared_deviation(listed)
    if options.std == "population":
        scale *= math.sqrt((len(listed) - 1) / len(listed))
    scale = 1.0 if options.std == "none" else scale + options.eps
    for judged in present:
        steps = returns[judged.episode.id][: len(judged.steps())]
        credits |= by_step(judged, [Credit((number - middle) / scale) for number in steps])
    return credits


RULE = CreditRule(
    name="intermediate",
    formula="A_k = (G_k - mean G) / (std G + eps), G_k = sum_j gamma^(j-k) r_j with rewards about calls",
    paper="returns-to-go with a group baseline",
    options=IntermediateOptions,
    assign=intermediate,
    reads=reads_calls,
)
