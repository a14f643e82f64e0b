"""Running baseline: an episode against those that ended before it. For live traffic without siblings.

Paper: role-conditioned advantage estimation (RAE) of SPIRAL (arXiv 2506.24119).

    b_e     = sum_i decay^(n-i) R_i / sum_i decay^(n-i)      i = 1 .. n: those of e's key that ended before e
    A_{e,k} = R_e - b_e

"Before": (ended_at_ms, episode id) is smaller. The key: the whole policy, the task, or the value of a tag.
The past is read from the log (every ended, rewarded training episode of the policy), so the same log gives
the same baseline in every process, whatever was trained in between; a late reward changes it from then on.

Departures:
- The paper starts its baseline at 0, which makes the first rewards advantages; here the average is over what
  was seen (the weights are divided out), and an episode with fewer than `min_history` before it gets None
  with the reason `no_baseline_yet`.
- One baseline per key, not per role: the reward is the episode's.
- Siblings are not compared with each other; the group plays no part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import Field

from ..reasons import Reason
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedGroup,
    PastEpisode,
    RuleOptions,
    same_for_all,
    set_aside_credits,
    value_of,
)


class RunningBaselineOptions(RuleOptions):
    """What the baseline remembers."""

    decay: float = Field(0.95, gt=0, lt=1, description="Weight of each older episode against the next.")
    key: str = Field(
        "policy",
        pattern=r"^(policy|task|tag:.+)$",
        description="Which episodes share a baseline: policy (all), task, or tag:NAME.",
    )
    min_history: int = Field(4, ge=1, description="Fewest earlier episodes for an advantage.")


class _Past:
    """The running averages of one key's episodes, in the order in which they ended."""

    def __init__(self, episodes: Sequence[PastEpisode], decay: float) -> None:
        ordered = sorted({(past.ended_at_ms, past.id): past.value for past in episodes}.items())
        self.ends = [end for end, _ in ordered]
        self.averages: list[float] = []
        total = weight = 0.0
        for _, value in ordered:
            total, weight = decay * total + value, decay * weight + 1.0
            self.averages.append(total / weight)

    def before(self, end: tuple[int, str], fewest: int) -> float | None:
        number = bisect_left(self.ends, end)
        return self.averages[number - 1] if number >= fewest else None


def running_baseline(
    groups: Sequence[JudgedGroup], options: RunningBaselineOptions, context: CreditContext
) -> dict[ChoiceKey, Credit]:
    by_key: dict[str | None, list[PastEpisode]] = defaultdict(list)
    for ended in context.history:
        by_key[_key(options.key, ended.task_id, ended.tags)].append(ended)
    pasts = {key: _Past(episodes, options.decay) for key, episodes in by_key.items()}
    nothing = _Past((), options.decay)
    credits: dict[ChoiceKey, Credit] = {}
    for group in groups:
        credits |= set_aside_credits(group)
        for judged in group.present():
            episode = judged.episode
            past = pasts.get(_key(options.key, episode.task_id, episode.tags), nothing)
            baseline = past.before((episode.ended_at_ms or 0, episode.id), options.min_history)
            if baseline is None:
                credit = Credit(None, Reason.NO_BASELINE_YET)
            else:
                credit = Credit(value_of(judged) - baseline)
            credits |= same_for_all(judged, credit)
    return credits


def _key(kind: str, task_id: str | None, tags: Mapping[str, str]) -> str | None:
    if kind == "policy":
        return ""
    return task_id if kind == "task" else tags.get(kind.removeprefix("tag:"))


RULE = CreditRule(
    name="running_baseline",
    formula="A_e = R_e - exponential average of the rewards of episodes that ended before e",
    paper="RAE of SPIRAL, arXiv 2506.24119",
    options=RunningBaselineOptions,
    assign=running_baseline,
    reads=lambda _: frozenset({"history"}),
    fewest_episodes=1,
)
