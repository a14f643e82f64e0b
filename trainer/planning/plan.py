"""Groups -> the manifest of one optimizer step, and the counts that explain it.

The manifest is what the training run consumes and what a dry run writes; neither this nor anything that it
imports knows torch.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import UserError
from ...records import Call, Choice, Group, ManifestChoice, StepManifest, Transition
from ..credit.base import ChoiceKey, Credit, CreditContext, JudgedEpisode, JudgedGroup
from ..credit.registry import Assignment
from ..reasons import NO_VARIANCE, OF_A_RULE, Reason, cause_of
from .selection import SelectionRules, choice_reasons, judge_group, num_tokens, temperature_of
from .weights import CONSTANT_TOKENS, TrainedChoice, Weighting, multipliers


@dataclass(frozen=True, slots=True)
class PlanSettings:
    selection: SelectionRules
    credit: Assignment
    weighting: Weighting = "episode"
    constant_tokens: int = CONSTANT_TOKENS  # of the constant weighting


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one step trains and leaves out. The `…_excluded` maps count by reason."""

    groups: int
    groups_trained: int
    episodes: int
    episodes_trained: int
    episodes_excluded: Mapping[str, int]
    choices: int
    choices_trained: int
    choices_excluded: Mapping[str, int]
    trained_tokens: int
    call_tokens: int  # prompt + completion of every trained choice, as the user would count them
    reward_mean: float | None  # over the episodes that were judged, those without variance included

    def describe(self) -> str:
        """One line for people."""
        episodes = _with_reasons(self.episodes_trained, self.episodes, self.episodes_excluded)
        choices = _with_reasons(self.choices_trained, self.choices, self.choices_excluded)
        return f"{self.groups_trained}/{self.groups} groups, episodes {episodes}, choices {choices}"

    def why_nothing(self) -> str:
        """The main cause of a step that trains nothing, in one line."""
        causes = {reason: count for reason, count in self.episodes_excluded.items() if reason in NO_VARIANCE}
        if causes:
            main = max(causes, key=lambda reason: causes[reason])
            return (
                f"no group has variance ({cause_of(main)} in most: {_reasons(self.episodes_excluded)}); "
                "take harder, easier or more varied tasks, or more episodes of each"
            )
        if not self.episodes:
            return "the groups hold no episodes"
        why = f"nothing is left of {self.episodes} episodes ({_reasons(self.episodes_excluded)}"
        return f"{why}; choices: {_reasons(self.choices_excluded)})"


@dataclass(frozen=True, slots=True)
class StepPlan:
    manifest: StepManifest
    counts: StepCounts

    @property
    def trains(self) -> bool:
        return self.counts.choices_trained > 0


def withheld(plan: StepPlan, reason: Reason) -> StepPlan:
    """The same step with nothing trained, for the reason given."""
    choices = tuple(
        choice if choice.advantage is None else replace(choice, advantage=None, multiplier=0.0, reason=reason)
        for choice in plan.manifest.choices
    )
    counts = plan.counts
    return StepPlan(
        replace(plan.manifest, choices=choices),
        replace(
            counts,
            groups_trained=0,
            episodes_trained=0,
            episodes_excluded={**counts.episodes_excluded, reason: counts.episodes_trained},
            choices_trained=0,
            choices_excluded={**counts.choices_excluded, reason: counts.choices_trained},
            trained_tokens=0,
            call_tokens=0,
        ),
    )


_NO_CONTEXT = CreditContext()


def plan_step(
    groups: Sequence[Group],
    settings: PlanSettings,
    *,
    run_id: str,
    step: int,
    from_version: int,
    context: CreditContext = _NO_CONTEXT,
) -> StepPlan:
    """Judge, give credit, mask, weigh: everything about a step that needs no weights."""
    judged = [judge_group(group, settings.selection) for group in groups]
    given = settings.credit.assign(judged, context)
    excluded: dict[ChoiceKey, str | None] = {}
    for group in judged:
        for member in group.episodes:
            excluded |= choice_reasons(member.episode, settings.selection, from_version=from_version)
    credits = {
        (call.id, choice.index): _final_credit(given, episode, call, choice, excluded[call.id, choice.index])
        for episode, call, choice in _choices(judged)
    }
    trained = {
        (call.id, choice.index): TrainedChoice(episode.episode.id, len(choice.completion_ids))
        for episode, call, choice in _choices(judged)
        if credits[call.id, choice.index].advantage is not None
    }
    weights = multipliers(trained, settings.weighting, settings.constant_tokens)
    manifest = StepManifest(
        run_id=run_id,
        step=step,
        policy=settings.selection.policy,
        from_version=from_version,
        choices=tuple(_manifest_choices(judged, credits, weights)),
        reward_ids={e.episode.id: _rows_used(e, settings.credit) for group in judged for e in group.episodes},
        returns={e.episode.id: e.value for group in judged for e in group.episodes if e.value is not None},
    )
    return StepPlan(manifest, _count(judged, credits, trained))


def _final_credit(
    given: Mapping[ChoiceKey, Credit],
    episode: JudgedEpisode,
    call: Call,
    choice: Choice,
    excluded: str | None,
) -> Credit:
    """The rule's word, unless the choice or its episode takes no part; a rule that is silent is said so."""
    if excluded is not None:
        return Credit(None, excluded)
    if episode.set_aside is not None:
        return Credit(None, episode.set_aside)
    credit = given.get((call.id, choice.index))
    if credit is None:
        return Credit(None, Reason.NO_CREDIT)
    if credit.advantage is None:
        return credit if credit.reason is not None else Credit(None, Reason.NO_CREDIT)
    if not math.isfinite(credit.advantage):
        raise UserError(
            f"the credit rule gave choice {choice.index} of call {call.id} the advantage {credit.advantage}; "
            "look at the episode's rewards, or at the rule"
        )
    return Credit(credit.advantage)


def _rows_used(judged: JudgedEpisode, credit: Assignment) -> tuple[str, ...]:
    reads_parts = credit.reads & {"calls", "agents"}
    return (*judged.reward_ids, *judged.parts.reward_ids) if reads_parts else tuple(judged.reward_ids)


def transitions(manifest: StepManifest, groups: Sequence[Group]) -> list[Transition]:
    """The trained choices of a manifest, with their tokens from the log, in the manifest's order."""
    calls = {call.id: call for group in groups for episode in group.episodes for call in episode.calls}
    found = []
    for row in manifest.choices:
        if row.advantage is None:
            continue
        call = calls.get(row.call_id)
        choice = next((c for c in call.choices if c.index == row.choice_index), None) if call else None
        if call is None or choice is None:
            raise UserError(
                f"step {manifest.step} trains choice {row.choice_index} of call {row.call_id}, which this "
                "log does not hold: is it another database, or was the call deleted?"
            )
        found.append(
            Transition(
                call_id=call.id,
                choice_index=choice.index,
                prompt_ids=call.prompt_ids,
                completion_ids=choice.completion_ids,
                behavior_logprobs=choice.behavior_logprobs,
                temperature=temperature_of(call),
                advantage=row.advantage,
                multiplier=row.multiplier,
            )
        )
    return found


def _choices(judged: Sequence[JudgedGroup]) -> Iterator[tuple[JudgedEpisode, Call, Choice]]:
    for group in judged:
        for episode in group.episodes:
            for call in episode.episode.calls:
                for choice in call.choices:
                    yield episode, call, choice


def _manifest_choices(
    judged: Sequence[JudgedGroup], credits: Mapping[ChoiceKey, Credit], weights: Mapping[ChoiceKey, float]
) -> Iterator[ManifestChoice]:
    for episode, call, choice in _choices(judged):
        key = (call.id, choice.index)
        yield ManifestChoice(
            call_id=call.id,
            choice_index=choice.index,
            episode_id=episode.episode.id,
            group_id=episode.episode.group_id,
            agent=call.agent,
            advantage=credits[key].advantage,
            multiplier=weights.get(key, 0.0),
            reason=credits[key].reason,
        )


def _count(
    judged: Sequence[JudgedGroup],
    credits: Mapping[ChoiceKey, Credit],
    trained: Mapping[ChoiceKey, TrainedChoice],
) -> StepCounts:
    rewards = [
        e.value for group in judged for e in group.episodes if e.set_aside is None and e.value is not None
    ]
    episodes = [episode for group in judged for episode in group.episodes]
    trained_ids = {choice.episode_id for choice in trained.values()}
    excluded = Counter(_episode_reason(e, credits) for e in episodes if e.episode.id not in trained_ids)
    return StepCounts(
        groups=len(judged),
        groups_trained=sum(any(e.episode.id in trained_ids for e in group.episodes) for group in judged),
        episodes=len(episodes),
        episodes_trained=len(trained_ids),
        episodes_excluded=dict(excluded.most_common()),
        choices=len(credits),
        choices_trained=len(trained),
        choices_excluded=dict(
            Counter(c.reason for c in credits.values() if c.reason is not None).most_common()
        ),
        trained_tokens=sum(choice.num_tokens for choice in trained.values()),
        call_tokens=sum(
            num_tokens(call, choice)
            for _, call, choice in _choices(judged)
            if (call.id, choice.index) in trained
        ),
        reward_mean=statistics.fmean(rewards) if rewards else None,
    )


def _episode_reason(judged: JudgedEpisode, credits: Mapping[ChoiceKey, Credit]) -> str:
    """Why no choice of this episode is trained: the episode's own reason, else its group's, else its
    choices'."""
    if judged.set_aside is not None:
        return judged.set_aside
    reasons = [
        credits[call.id, choice.index].reason for call in judged.episode.calls for choice in call.choices
    ]
    for reason in reasons:
        if reason is not None and reason in OF_A_RULE:
            return reason
    return Reason.TOO_LONG if Reason.TOO_LONG in reasons else Reason.NO_TRAINABLE_CHOICE


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _with_reasons(trained: int, total: int, excluded: Mapping[str, int]) -> str:
    return f"{trained}/{total}" + (f" ({_reasons(excluded)})" if excluded else "")
