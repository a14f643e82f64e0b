"""Which episodes and choices may be trained, and why the others may not.

Pure: episodes come in as records and go out judged. It does not know where they are stored, what a credit
rule makes of them, or what a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError
from ..records import Call, CallKind, Choice, Episode, EpisodeStatus, Group, Purpose, Quarantine
from ..store.rewards import resolve
from .credit.base import JudgedEpisode, JudgedGroup
from .reasons import Reason

Unrewarded = Literal["skip", "error"]


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """The stated policies of one run."""

    policy: str
    unrewarded: Unrewarded = "skip"
    max_staleness: int | None = None  # None: calls of any version are trained


_STATUS_REASONS = {
    EpisodeStatus.RUNNING: Reason.RUNNING,
    EpisodeStatus.FAILED: Reason.FAILED,
    EpisodeStatus.EXCLUDED: Reason.EXCLUDED,
}


def judge_group(group: Group, rules: SelectionRules) -> JudgedGroup:
    """Resolve each episode's reward and set aside those that take no part in the baseline."""
    return JudgedGroup(
        group.id, group.task_id, tuple(judge_episode(episode, rules) for episode in group.episodes)
    )


def judge_episode(episode: Episode, rules: SelectionRules) -> JudgedEpisode:
    resolution = resolve(episode.rewards)
    reason: Reason | None = None
    if episode.purpose is not Purpose.TRAIN:
        reason = Reason.EVALUATION
    elif episode.status in _STATUS_REASONS:
        reason = _STATUS_REASONS[episode.status]
    elif episode.has_gap:
        reason = Reason.GAP
    elif resolution.value is None:
        if rules.unrewarded == "error":
            raise UserError(
                f"episode {episode.id} ended without a reward: give it one (lightning reward {episode.id} "
                'VALUE), or leave such episodes out with unrewarded = "skip"'
            )
        reason = Reason.UNREWARDED
    return JudgedEpisode(episode, resolution.value, tuple(resolution.reward_ids), reason)


def choice_reason(call: Call, choice: Choice, rules: SelectionRules, *, from_version: int) -> str | None:
    """Why this choice gets no loss, or None. `from_version`: of the weights that the step starts from."""
    return next(_choice_reasons(call, choice, rules, from_version), None)


def _choice_reasons(call: Call, choice: Choice, rules: SelectionRules, from_version: int) -> Iterator[str]:
    """Every reason against it, the most telling first."""
    if call.kind is not CallKind.POLICY:
        yield Reason.SIDE_CALL if call.kind is CallKind.SIDE else f"{call.kind}_call"
    if choice.quarantine is not None:
        yield choice.quarantine
    if call.policy != rules.policy:
        yield Reason.OTHER_POLICY
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
