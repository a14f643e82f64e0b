"""Which weights did a call's recorded tokens come from? Asked of transformers, not of any label.

The ids of a recorded call are scored under the version that its row claims, under its neighbours, and under
the base: it is a mismatch if another fits its recorded logprobs better, or none fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from lightning_rl.records import Call

from .weights import BASE, Trainer

FITS = 0.02
"""Largest difference of any token's logprob, in nats, of the same weights: float32, other batch shapes."""


@dataclass(slots=True)
class Rescored:
    """`worst_gap`: of a call to its own version; `nearest_other`: the smallest to any other one."""

    num_calls: int = 0
    by_version: Counter[int] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    worst_gap: float = 0.0
    nearest_other: float = float("inf")

    def say(self) -> str:
        return (
            f"{self.num_calls} calls of {len(self.by_version)} versions re-scored: {len(self.mismatches)} "
            f"mismatches; at most {self.worst_gap:.2g} nats from their own version, at least "
            f"{self.nearest_other:.2g} from any other"
        )


def sample(calls: Sequence[Call], number: int, seed: int = 0) -> list[Call]:
    """At least `number` of them if there are so many, every version with a fair share."""
    by_version: dict[int | None, list[Call]] = {}
    for call in calls:
        by_version.setdefault(call.policy_version, []).append(call)
    share = -(-number // max(1, len(by_version)))
    chance = Random(seed)
    chosen: list[Call] = []
    rest: list[Call] = []
    for its in by_version.values():
        chance.shuffle(its)
        chosen += its[:share]
        rest += its[share:]
    return [*chosen, *rest[: max(0, number - len(chosen))]]


def rescore(trainer: Trainer, calls: Sequence[Call], claims: Mapping[int, str]) -> Rescored:
    """`claims`: version -> the weights that its candidate row promised; version 0 is the base."""
    found = Rescored()
    named = {0: BASE, **claims}
    for call in sorted(calls, key=lambda call: call.policy_version or 0):
        version = call.policy_version
        if version is None or version not in named or call.policy_version_end not in (None, version):
            found.num_calls += 1
            found.mismatches.append(f"{call.id}: version {version} to {call.policy_version_end}")
            continue
        near = {BASE, *(named[v] for v in range(version - 2, version + 3) if v in named)}
        gaps = {name: gap_to(trainer, call, name) for name in near}
        own = gaps.pop(named[version])
        found.num_calls += 1
        found.by_version[version] += 1
        found.worst_gap = max(found.worst_gap, own)
        other = min(gaps.values(), default=float("inf"))
        found.nearest_other = min(found.nearest_other, other)
        if own > FITS or other < own:
            best = min(gaps, key=gaps.__getitem__, default="nothing")
            found.mismatches.append(
                f"{call.id} claims version {version} ({named[version]}), {own:.2g} away; {best}: {other:.2g}"
            )
    return found


def gap_to(trainer: Trainer, call: Call, name: str) -> float:
    """The largest difference between recorded and re-scored logprobs of a call's answer."""
    (choice,) = call.choices
    num_tokens = len(choice.completion_ids)
    if num_tokens == 0 or num_tokens != len(choice.behavior_logprobs):
        return float("inf")
    scored = trainer.score(name, call.prompt_ids + choice.completion_ids, num_tokens)
    return max(abs(a - b) for a, b in zip(choice.behavior_logprobs, scored, strict=True))
