"""From the reward rows of an episode to the numbers that credit starts from. Pure: no SQL, no I/O.

A row counts unless another row supersedes it, a newer one of the same source says something about the same
thing, or its source weighs nothing. What is left of one thing is averaged over its sources by their weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..records import Reward, RewardTarget

SourceWeights = Mapping[str, float]
"""Weight of a source against the others, >= 0; 1 where none is stated, and 0 silences it."""

_EQUAL: SourceWeights = {}


@dataclass(frozen=True, slots=True)
class Resolution:
    """`value` None: nobody has said anything that stands, which is not zero.

    `reward_ids`: the rows that the value came from. `path`: how it came about, in words.
    """

    value: float | None
    reward_ids: tuple[str, ...]
    sources: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What a row is about: the whole episode, an agent in it, a call, one choice of it, a range of tokens."""

    target: RewardTarget
    agent: str = ""
    call_id: str = ""
    choice_index: int = -1  # -1: the call as a whole
    token_start: int = -1
    token_end: int = -1

    def describe(self) -> str:
        if self.target is RewardTarget.EPISODE:
            return "episode"
        if self.target is RewardTarget.AGENT:
            return f"agent {self.agent}"
        choice = f" choice {self.choice_index}" if self.choice_index >= 0 else ""
        tokens = f" tokens {self.token_start}-{self.token_end}" if self.token_start >= 0 else ""
        return f"call {self.call_id}{choice}{tokens}"


EPISODE = Part(RewardTarget.EPISODE)

COUNTS = "counts"
"""What became of a row that is part of the value."""


def part_of(reward: Reward) -> Part:
    index = reward.choice_index
    if reward.target is RewardTarget.TOKENS and index is None:
        index = 0
    return Part(
        target=reward.target,
        agent=reward.agent or "",
        call_id=reward.call_id or "",
        choice_index=-1 if index is None else index,
        token_start=-1 if reward.token_start is None else reward.token_start,
        token_end=-1 if reward.token_end is None else reward.token_end,
    )


def resolve(
    rewards: Sequence[Reward], weights: SourceWeights = _EQUAL, *, only: frozenset[str] | None = None
) -> Resolution:
    """What the rows come to about the episode as a whole. `only`: of these sources."""
    about = [reward for reward in rewards if reward.target is RewardTarget.EPISODE]
    if only is not None:
        about = [reward for reward in about if reward.source in only]
    counting = _counting(about, _superseded(rewards), weights)
    if not counting:
        return Resolution(None, (), (), _why_none(rewards, about, weights))
    return _combined(counting, weights, num_rows=len(about))


def resolve_parts(rewards: Sequence[Reward], weights: SourceWeights = _EQUAL) -> dict[Part, Resolution]:
    """The same for everything that a row which counts is about, the episode included."""
    about: dict[Part, list[Reward]] = defaultdict(list)
    for reward in rewards:
        about[part_of(reward)].append(reward)
    superseded = _superseded(rewards)
    found: dict[Part, Resolution] = {}
    for part in sorted(about):
        if counting := _counting(about[part], superseded, weights):
            found[part] = _combined(counting, weights, num_rows=len(about[part]))
    return found


def fate_of_rows(rewards: Sequence[Reward], weights: SourceWeights = _EQUAL) -> dict[str, str]:
    """What became of each row, by id: "counts", or why it does not."""
    by = {reward.supersedes: reward.id for reward in rewards if reward.supersedes is not None}
    newest: dict[tuple[Part, str], str] = {}
    for reward in _by_age(rewards):
        if reward.id not in by:
            newest[part_of(reward), reward.source] = reward.id
    fates: dict[str, str] = {}
    for reward in rewards:
        last = newest.get((part_of(reward), reward.source))
        if reward.id in by:
            fates[reward.id] = f"superseded by {by[reward.id]}"
        elif weights.get(reward.source, 1.0) <= 0:
            fates[reward.id] = "its source weighs 0"
        elif last != reward.id:
            fates[reward.id] = f"older than {last}"
        else:
            fates[reward.id] = COUNTS
    return fates


def _by_age(rewards: Sequence[Reward]) -> list[Reward]:
    return sorted(rewards, key=lambda reward: (reward.created_at_ms, reward.id))


def _superseded(rewards: Sequence[Reward]) -> set[str]:
    return {reward.supersedes for reward in rewards if reward.supersedes is not None}


def _counting(about: Sequence[Reward], superseded: set[str], weights: SourceWeights) -> list[Reward]:
    """The newest row of each source that weighs anything, by source."""
    newest: dict[str, Reward] = {}
    for reward in _by_age(about):
        if reward.id not in superseded and weights.get(reward.source, 1.0) > 0:
            newest[reward.source] = reward
    return [newest[source] for source in sorted(newest)]


def _combined(used: Sequence[Reward], weights: SourceWeights, *, num_rows: int) -> Resolution:
    by_weight = [weights.get(reward.source, 1.0) for reward in used]
    value = used[0].value if len(used) == 1 else fmean([reward.value for reward in used], by_weight)
    said = ", ".join(
        f"{reward.source}={reward.value:g}" + (f" (weight {weight:g})" if weight != 1.0 else "")
        for reward, weight in zip(used, by_weight, strict=True)
    )
    path = said if len(used) == 1 else f"mean of {said} = {value:g}"
    older = num_rows - len(used)
    path += f" ({older} older or superseded)" if older else ""
    return Resolution(value, tuple(r.id for r in used), tuple(r.source for r in used), path)


def _why_none(rewards: Sequence[Reward], about: Sequence[Reward], weights: SourceWeights) -> str:
    if about and any(weights.get(reward.source, 1.0) <= 0 for reward in about):
        return f"no reward: none of the {len(about)} rows about the episode counts (superseded, or weight 0)"
    if about:
        return f"no reward: all {len(about)} rows about the episode are superseded"
    if rewards:
        return f"no reward about the episode ({len(rewards)} about parts of it)"
    return "no reward"
