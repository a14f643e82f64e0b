"""Rewards and returns of an episode's single steps, for the rules that look below the episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from ..reasons import Reason
from .base import JudgedEpisode, JudgedGroup, Reads, RuleOptions, standing_sources, value_of


class StepOptions(RuleOptions):
    """What a step's reward is."""

    gamma: float = Field(0.95, gt=0, le=1, description="Discount per call.")
    call_rewards: bool = Field(True, description="Add rewards about calls; else only the episode's counts.")
    call_sources: Literal["equal", "any"] = Field(
        "equal",
        description="equal: episodes whose calls were judged by other sources than most of the group's are "
        "set aside. any: a call that nobody judged has 0.",
    )


def reads_calls(options: StepOptions) -> frozenset[Reads]:
    return frozenset({"calls"}) if options.call_rewards else frozenset()


def comparable(group: JudgedGroup, options: StepOptions) -> JudgedGroup:
    """The group without (set aside) the episodes whose calls were judged by other sources than the rest's.

    Where one sibling's calls were never looked at, its missing rewards are no zeros.
    """
    if not options.call_rewards or options.call_sources == "any":
        return group
    present = group.present()
    if len({judged.parts.call_sources for judged in present}) < 2:
        return group
    standing = standing_sources([judged.parts.call_sources for judged in present])
    episodes = tuple(
        replace(judged, set_aside=Reason.UNEQUAL_SOURCES)
        if judged.set_aside is None and judged.parts.call_sources != standing
        else judged
        for judged in group.episodes
    )
    return replace(group, episodes=episodes)


def step_rewards(judged: JudgedEpisode, options: StepOptions) -> list[float]:
    """r_k: what was said about the call (0 where nothing was), plus the episode's value on the last step.

    An episode without a single step has the one reward that it has.
    """
    said = judged.parts.calls if options.call_rewards else {}
    rewards = [said.get(call.id, 0.0) for call in judged.steps()] or [0.0]
    rewards[-1] += value_of(judged)
    return rewards


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_k = sum over j >= k of gamma^(j-k) r_j."""
    found: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        found.append(following)
    return found[::-1]
