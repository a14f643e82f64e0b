"""Which episodes and choices may be trained, and why the others may not.

Pure: episodes come in as records and go out judged. It does not know where they are stored, what a credit
rule makes of them, or what a tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...errors import UserError
from ...records import (
    Call,
    CallKind,
    Choice,
    Episode,
    EpisodeStatus,
    Group,
    Purpose,
    Quarantine,
    RewardTarget,
)
from ...store.rewards import Resolution, SourceWeights, resolve, resolve_parts
from ..credit.base import JudgedEpisode, JudgedGroup, PartRewards, standing_sources
from ..reasons import Reason

UnequalSources = Literal["set_aside", "common"]
TooLong = Literal["call", "episode"]


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """The stated policies of one run."""

    policy: str
    unrewarded: str = "skip"  # "skip" | "error" | "fill=NUMBER"
    max_staleness: int | None = None  # None: calls of any version are trained
    failed: str = "skip"  # "skip" | "as_rewarded" | "fill=NUMBER"
    unequal_sources: UnequalSources = "set_aside"
    source_weights: SourceWeights = field(default_factory=dict)
    train_agents: frozenset[str] = frozenset()  # empty: all
    max_sequence_tokens: int | None = None  # prompt and answer together; None: no bound
    too_long: TooLong = "call"  # what loses its loss with a call beyond that


_STATUS_REASONS = {
    EpisodeStatus.RUNNING: Reason.RUNNING,
    EpisodeStatus.FAILED: Reason.FAILED,
    EpisodeStatus.EXCLUDED: Reason.EXCLUDED,
}


def judge_group(group: Group, rules: SelectionRules) -> JudgedGroup:
    """Resolve each episode's reward and set aside those that take no part in the baseline."""
    resolved = {episode.id: resolve(episode.rewards, rules.source_weights) for episode in group.episodes}
    judged = [judge_episode(episode, rules, resolved[episode.id]) for episode in group.episodes]
    return JudgedGroup(group.id, group.task_id, tuple(_with_equal_sources(judged, resolved, rules)))


def judge_episode(
    episode: Episode, rules: SelectionRules, resolution: Resolution | None = None
) -> JudgedEpisode:
    """`resolution`: of its reward rows about the episode, where the caller has it already."""
    found = resolution or resolve(episode.rewards, rules.source_weights)
    parts = _part_rewards(episode, rules.source_weights)
    if (reason := _no_part(episode, rules)) is not None:
        return JudgedEpisode(episode, found.value, found.reward_ids, reason, parts)
    if episode.status is EpisodeStatus.FAILED and (filled := fill_value(rules.failed)) is not None:
        return JudgedEpisode(episode, filled, (), None, parts)
    if found.value is not None:
        return JudgedEpisode(episode, found.value, found.reward_ids, None, parts)
    if rules.unrewarded == "error":
        raise UserError(
            f"episode {episode.id} ended without a reward: give it one (lightning reward {episode.id} "
            'VALUE), or leave such episodes out with unrewarded = "skip"'
        )
    filled = fill_value(rules.unrewarded)
    return JudgedEpisode(episode, filled, (), Reason.UNREWARDED if filled is None else None, parts)


def fill_value(policy: str) -> float | None:
    """The number of "fill=NUMBER"; None for the other policies."""
    return float(policy.removeprefix("fill=")) if policy.startswith("fill=") else None


def _no_part(episode: Episode, rules: SelectionRules) -> Reason | None:
    """Why it takes no part, whatever it was worth."""
    if episode.purpose is not Purpose.TRAIN:
        return Reason.EVALUATION
    if episode.status is EpisodeStatus.FAILED and rules.failed != "skip":
        return Reason.GAP if episode.has_gap else None
    if episode.status in _STATUS_REASONS:
        return _STATUS_REASONS[episode.status]
    return Reason.GAP if episode.has_gap else None


def _with_equal_sources(
    judged: Sequence[JudgedEpisode], resolved: Mapping[str, Resolution], rules: SelectionRules
) -> Iterator[JudgedEpisode]:
    """A source that judged only some siblings compares nobody: those judged by others than most are set
    aside, or only what all have in common counts. Filled values have no source and no part in this."""
    sources = {e.episode.id: frozenset(resolved[e.episode.id].sources) for e in judged if _was_said(e)}
    if len(set(sources.values())) < 2:
        yield from judged
        return
    common = frozenset.intersection(*sources.values())
    standing = standing_sources([sources[name] for name in sorted(sources)])
    for one in judged:
        if one.episode.id not in sources:
            yield one
        elif rules.unequal_sources == "common" and common:
            found = resolve(one.episode.rewards, rules.source_weights, only=common)
            yield replace(one, value=found.value, reward_ids=found.reward_ids)
        elif sources[one.episode.id] != standing:
            yield replace(one, set_aside=Reason.UNEQUAL_SOURCES)
        else:
            yield one


def _was_said(judged: JudgedEpisode) -> bool:
    return judged.set_aside is None and bool(judged.reward_ids)


def _part_rewards(episode: Episode, weights: SourceWeights) -> PartRewards:
    """What was said about agents and calls. A call has its own reward, and those of its used choices and of
    ranges of their tokens, added up."""
    if all(reward.target is RewardTarget.EPISODE for reward in episode.rewards):
        return PartRewards()
    unused = {
        (call.id, choice.index)
        for call in episode.calls
        for choice in call.choices
        if not _was_used(choice, call.choices)
    }
    calls: dict[str, float] = {}
    agents: dict[str, float] = {}
    agent_sources: dict[str, frozenset[str]] = {}
    call_sources: set[str] = set()
    ids: list[str] = []
    for part, found in resolve_parts(episode.rewards, weights).items():
        if part.target is RewardTarget.EPISODE or (part.call_id, part.choice_index) in unused:
            continue
        assert found.value is not None, "a part without a row that counts is not resolved"
        ids += found.reward_ids
        if part.target is RewardTarget.AGENT:
            agents[part.agent] = found.value
            agent_sources[part.agent] = frozenset(found.sources)
        else:
            calls[part.call_id] = calls.get(part.call_id, 0.0) + found.value
            call_sources |= set(found.sources)
    return PartRewards(calls, frozenset(call_sources), agents, agent_sources, tuple(ids))


def choice_reasons(
    episode: Episode, rules: SelectionRules, *, from_version: int
) -> dict[tuple[str, int], str | None]:
    """Of each choice why it gets no loss, or None. `from_version`: of the weights that the step starts
    from."""
    found = {
        (call.id, choice.index): next(_choice_reasons(call, choice, rules, from_version), None)
        for call in episode.calls
        for choice in call.choices
    }
    if rules.too_long == "episode" and Reason.TOO_LONG in found.values():
        return {key: reason or Reason.TOO_LONG for key, reason in found.items()}
    return found


def _choice_reasons(call: Call, choice: Choice, rules: SelectionRules, from_version: int) -> Iterator[str]:
    """Every reason against it, the most telling first."""
    if call.kind is not CallKind.POLICY:
        yield Reason.SIDE_CALL if call.kind is CallKind.SIDE else f"{call.kind}_call"
    if choice.quarantine is not None:
        yield choice.quarantine
    if call.policy != rules.policy:
        yield Reason.OTHER_POLICY
    if rules.train_agents and call.agent not in rules.train_agents:
        yield Reason.OTHER_AGENT
    if not call.prompt_ids:
        yield Quarantine.NO_PROMPT_IDS
    if not choice.completion_ids:
        yield Quarantine.NO_COMPLETION_IDS
    if len(choice.completion_ids) != len(choice.behavior_logprobs):
        yield Quarantine.MISALIGNED
    if temperature_of(call) <= 0.0:
        yield Quarantine.TEMPERATURE_ZERO
    if not _was_used(choice, call.choices):
        yield Reason.NOT_USED
    if rules.max_staleness is not None and _staleness(call, from_version) > rules.max_staleness:
        yield Reason.STALE
    # The last one: only what would be trained but for its length takes its episode along.
    if num_tokens(call, choice) > (rules.max_sequence_tokens or math.inf):
        yield Reason.TOO_LONG


def num_tokens(call: Call, choice: Choice) -> int:
    return len(call.prompt_ids) + len(choice.completion_ids)


def _was_used(choice: Choice, siblings: Sequence[Choice]) -> bool:
    """Where nobody said anything all count as used; where one was named, the unnamed ones were not."""
    if choice.used is not None:
        return choice.used
    return not any(sibling.used for sibling in siblings)


def _staleness(call: Call, from_version: int) -> int:
    """Versions between the call's and the trained one. A call whose version is not known is the oldest."""
    return from_version - (call.policy_version if call.policy_version is not None else -1)


def temperature_of(call: Call) -> float:
    """The temperature that the call was sampled at; the engine's default where the agent sent none."""
    sent = call.sampling.get("temperature")
    return 1.0 if sent is None else float(sent)
