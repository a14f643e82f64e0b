"""Means, deviations and returns that the rules share, and why a comparison gives nobody an advantage.

Conventions of every rule: sums are exact (`math.fsum`), so that no order of reading changes a digit; `std` is
the sample standard deviation (n - 1) unless an option says otherwise; no epsilon is added unless an option
says so, because numbers that are all equal (within 1e-9 of their size) are never divided by their deviation:
they have no variance, and the reason says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from ..reasons import Reason
from .base import JudgedGroup, RuleOptions, value_of

EQUAL_WITHIN = 1e-9
"""Rewards that differ by less than this, relative to their size, are one reward averaged in another order."""

MOST_EPS = 1e6
"""Beyond this no reward of any use is left of an advantage."""

Deviation = Literal["sample", "population", "none"]


class GroupOptions(RuleOptions):
    """How a group's rewards are brought to one scale."""

    std: Deviation = Field(
        "sample", description="Divide by the sample (n - 1) or population deviation, or not at all."
    )
    eps: float = Field(0.0, ge=0, le=MOST_EPS, description="Added to the deviation (TRL: 1e-4, verl: 1e-6).")


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], kind: Deviation = "sample") -> float:
    """1.0 for "none"."""
    if kind == "none":
        return 1.0
    middle = mean(values)
    squares = math.fsum((value - middle) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1 if kind == "sample" else len(values)))


def all_equal(values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return high - low <= EQUAL_WITHIN * max(1.0, abs(low), abs(high))


def why_no_comparison(values: Sequence[float]) -> Reason | None:
    """Why these rewards give nobody an advantage, or None where they do.

    A reward of 1 or more counts as solved and one of 0 or less as failed; the words only name the cause.
    """
    if len(values) < 2:
        return Reason.LONE_SURVIVOR
    if not all_equal(values):
        return None
    if min(values) >= 1.0:
        return Reason.ALL_SOLVED
    return Reason.ALL_FAILED if max(values) <= 0.0 else Reason.EQUAL_REWARDS


def normalised(values: Sequence[float], options: GroupOptions) -> list[float]:
    """(x - mean) / (std + eps) of numbers that are not all equal."""
    middle = mean(values)
    scale = deviation(values, options.std) + (options.eps if options.std != "none" else 0.0)
    return [(value - middle) / scale for value in values]


def group_advantages(
    group: JudgedGroup, options: GroupOptions, values: Mapping[str, float] | None = None
) -> dict[str, float] | Reason:
    """Episode id -> (R - mean) / (std + eps) over the episodes that take part; or why there is none.

    `values`: by episode id, instead of the episodes' own.
    """
    present = group.present()
    numbers = [value_of(e) if values is None else values[e.episode.id] for e in present]
    reason = why_no_comparison(numbers)
    if reason is not None:
        return reason
    pairs = zip(present, normalised(numbers, options), strict=True)
    return {judged.episode.id: advantage for judged, advantage in pairs}


def shared_deviation(per_episode: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean and sample deviation of numbers of which each EPISODE's together weigh one.

        mean = 1/E sum_e 1/K_e sum_k x_{e,k}        var = 1/(E-1) sum_e 1/K_e sum_k (x_{e,k} - mean)^2

    With one number per episode these are the ordinary ones.
    """
    middle = math.fsum(mean(numbers) for numbers in per_episode) / len(per_episode)
    squares = math.fsum(mean([(x - middle) ** 2 for x in numbers]) for numbers in per_episode)
    return middle, math.sqrt(squares / (len(per_episode) - 1))
