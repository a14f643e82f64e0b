"""Dr. MAS: each agent's calls normalised among that agent's own.

Paper: Dr. MAS (arXiv 2602.08847).

    A_{e,k} = (R_{e,a} - mean_{g,a} R) / (std_{g,a} R + eps)       a: the agent that made call k

mean and std run over the episodes of g in which a made a step, each counted once. R_{e,a} by the option
`agent_rewards`: "replace" takes the reward about a in e where there is one, else the episode's value; "add"
adds the two; "ignore" takes the episode's value.

Where one of the group's episodes has a reward about a and another has none, or they come from different
sources, those that differ from most are set aside for that agent's calls (`unequal_sources`).

Departures: the paper's mean and std run over an agent's steps, so that an episode in which it spoke often
weighs more; here the baseline counts episodes. Calls without an agent are an agent of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    Reads,
    restricted,
    set_aside_credits,
    standing_sources,
    value_of,
)
from .compare import GroupOptions
from .lightning import broadcast


class DrMasOptions(GroupOptions):
    """Whose reward an agent's calls get."""

    agent_rewards: Literal["replace", "add", "ignore"] = Field(
        "replace", description="What a reward about the agent does to the episode's value."
    )


def dr_mas(
    groups: Sequence[JudgedGroup], options: DrMasOptions, context: CreditContext
) -> dict[ChoiceKey, Credit]:
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        agents = {call.agent for judged in group.episodes for call in judged.steps()}
        for agent in sorted(agents, key=lambda name: name or ""):
            credits |= broadcast([_of_agent(group, agent, options)], options, context)
    return credits


def _of_agent(group: JudgedGroup, agent: str | None, options: DrMasOptions) -> JudgedGroup:
    """The agent's part of each episode in which it made a step, with its own value."""
    own = restricted(group, agent)
    own = replace(own, episodes=tuple(judged for judged in own.episodes if judged.steps()))
    if options.agent_rewards == "ignore" or agent is None or not own.present():
        return own
    standing = standing_sources([_sources(judged, agent) for judged in own.present()])
    return replace(own, episodes=tuple(_valued(judged, agent, standing, options) for judged in own.episodes))


def _valued(
    judged: JudgedEpisode, agent: str, standing: frozenset[str], options: DrMasOptions
) -> JudgedEpisode:
    if judged.set_aside is not None:
        return judged
    if _sources(judged, agent) != standing:
        return replace(judged, set_aside=Reason.UNEQUAL_SOURCES)
    said = judged.parts.agents.get(agent)
    if said is None:
        return judged
    return replace(judged, value=said if options.agent_rewards == "replace" else said + value_of(judged))


def _sources(judged: JudgedEpisode, agent: str) -> frozenset[str]:
    return judged.parts.agent_sources.get(agent, frozenset())


def _reads(options: DrMasOptions) -> frozenset[Reads]:
    return frozenset() if options.agent_rewards == "ignore" else frozenset({"agents"})


RULE = CreditRule(
    name="dr_mas",
    formula="A_{e,k} = (R_{e,a} - mean_{g,a} R) / (std_{g,a} R + eps), a: the agent of call k",
    paper="Dr. MAS, arXiv 2602.08847",
    options=DrMasOptions,
    assign=dr_mas,
    reads=_reads,
)
