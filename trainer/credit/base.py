"""What a credit rule takes and gives: the judged groups of one optimizer step in, an advantage per call out.

A rule is a pure function of the step's groups, its options and a context (values of a critic, the log's
history). It knows nothing of databases, tensors or tokens, and nothing of why a choice cannot be trained: it
gives credit to every step of an episode, and the plan masks out the excluded ones afterwards, so that an
excluded call keeps its place in the episode and loses only its loss.

A *step* of an episode is a call of kind `policy`. Side calls, judges' calls and retried duplicates are no
steps: they take no place, so that one more or less of them changes nobody's advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from ...records import Call, CallKind, Episode

ChoiceKey = tuple[str, int]
"""(call id, choice index)"""

Reads = Literal["calls", "agents", "values", "history"]
"""What a rule looks at beside the episodes' own values: rewards about calls or agents, a critic, the log."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartRewards:
    """What was said about parts of an episode, resolved. Absent: nobody said anything, which is not zero."""

    calls: Mapping[str, float] = field(default_factory=lambda: _NOTHING)  # by call id; token ranges added
    call_sources: frozenset[str] = frozenset()
    agents: Mapping[str, float] = field(default_factory=lambda: _NOTHING)  # by agent
    agent_sources: Mapping[str, frozenset[str]] = field(default_factory=lambda: _NOTHING)
    reward_ids: tuple[str, ...] = ()  # the rows that all these came from


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """An episode and what its rewards come to."""

    episode: Episode
    value: float | None  # the resolved reward; None where there is none
    reward_ids: tuple[str, ...]  # the rows that `value` came from
    set_aside: str | None  # why it takes no part in the baseline; None: it does, and `value` is a number
    parts: PartRewards = field(default_factory=PartRewards)

    def steps(self) -> tuple[Call, ...]:
        """The calls that count, in the order of the log."""
        calls = (call for call in self.episode.calls if call.kind is CallKind.POLICY)
        return tuple(sorted(calls, key=lambda call: (call.ordinal, call.id)))


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    id: str
    task_id: str
    episodes: tuple[JudgedEpisode, ...]

    def present(self) -> tuple[JudgedEpisode, ...]:
        """The episodes that take part, by id: sums come out the same in whatever order they were read."""
        taking_part = (judged for judged in self.episodes if judged.set_aside is None)
        return tuple(sorted(taking_part, key=lambda judged: judged.episode.id))


@dataclass(frozen=True, slots=True)
class Credit:
    """An advantage, or None with the reason. None (not trained) is not 0.0."""

    advantage: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PastEpisode:
    """An episode of the log that has ended and was judged: what a running baseline is made of."""

    id: str
    task_id: str | None
    tags: Mapping[str, str]
    ended_at_ms: int
    value: float


class Values(Protocol):
    """A critic's estimates: V at the last prompt token of a call, by call id. A dict is one."""

    def get(self, call_id: str, /) -> float | None: ...


@dataclass(frozen=True, slots=True)
class CreditContext:
    """What a rule may know beside the step's own groups. The same log and critic give the same context."""

    values: Values = field(default_factory=lambda: _NOTHING)
    history: Sequence[PastEpisode] = ()  # in any order; the step's own episodes may be among them


class RuleOptions(BaseModel):
    """Base of a rule's options: an unknown, ill-typed or infinite one is an error. People read the
    descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


OptionsT = TypeVar("OptionsT", bound=RuleOptions)
Credits = Mapping[ChoiceKey, Credit]


@dataclass(frozen=True, slots=True)
class CreditRule(Generic[OptionsT]):
    """A rule by its name. `assign` gives a credit for every choice of every step of every group."""

    name: str
    formula: str  # one line
    paper: str
    options: type[OptionsT]
    assign: Callable[[Sequence[JudgedGroup], OptionsT, CreditContext], Credits]
    reads: Callable[[OptionsT], frozenset[Reads]] = lambda _: frozenset()
    fewest_episodes: int = 2  # in a group, for anybody to get an advantage
    targets: Callable[[JudgedGroup, OptionsT, Values], Mapping[str, float]] | None = None
    """Of a rule that reads values: what the critic should have said, by call id."""


def same_for_all(judged: JudgedEpisode, credit: Credit) -> dict[ChoiceKey, Credit]:
    """One credit for every choice of every step of the episode."""
    return {(call.id, choice.index): credit for call in judged.steps() for choice in call.choices}


def by_step(judged: JudgedEpisode, credits: Sequence[Credit]) -> dict[ChoiceKey, Credit]:
    """The credits of the episode's steps, in their order."""
    return {
        (call.id, choice.index): credit
        for call, credit in zip(judged.steps(), credits, strict=True)
        for choice in call.choices
    }


def set_aside_credits(group: JudgedGroup) -> dict[ChoiceKey, Credit]:
    """Those of the episodes that take no part, with their reasons."""
    found: dict[ChoiceKey, Credit] = {}
    for judged in group.episodes:
        if judged.set_aside is not None:
            found |= same_for_all(judged, Credit(None, judged.set_aside))
    return found


def value_of(judged: JudgedEpisode) -> float:
    assert judged.value is not None, "an episode that takes part has a value"
    return judged.value


def restricted(group: JudgedGroup, agent: str | None) -> JudgedGroup:
    """The group as one agent saw it: its own calls only, in the episodes in which it made one."""
    episodes = []
    for judged in group.episodes:
        calls = tuple(call for call in judged.episode.calls if call.agent == agent)
        if calls:
            episodes.append(replace(judged, episode=replace(judged.episode, calls=calls)))
    return JudgedGroup(group.id, group.task_id, tuple(episodes))


def standing_sources(said: Sequence[frozenset[str]]) -> frozenset[str]:
    """The set of sources that most of the episodes were judged by: the one that the others are held against.

    Of two that are as frequent the one with more sources stands, then the first by name.
    """
    counted = Counter(said)
    return min(counted, key=lambda sources: (-counted[sources], -len(sources), sorted(sources)))
