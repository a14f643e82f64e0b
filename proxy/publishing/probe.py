"""Does the engine serve what the trainer trained? The judgement alone, on numbers that others have fetched.

Pure: no I/O, no SQL, no engine. All logprobs are natural logarithms over the same tokens in the same order.

The statistic. Per token, t = trainer after - trainer before, and e = engine after - engine before. Over the
tokens that the step moved most (the tenth with the largest |t|, at least 8):

    slope     = sum(t * e) / sum(t * t)             1: the engine moved as the trainer did; 0: it stood still
    residual  = sqrt(sum((e - t)^2) / sum(t * t))   0: exactly so; 1: as far off as standing still

Taking the engine's own change cancels what engine and trainer always disagree on (precision, kernels). Where
the engine did not serve the trainer's `before` to begin with (a rollback, a skipped version), its change
means nothing, and e = engine after - trainer before is judged instead: either of the two suffices, no other
weights satisfy one. A version far from it may look alike on these few tokens, so then the engine must also
have come nearer: its distance to the trainer's `after` at most half of what it was, where that was any.

The resolution is what the engine can't tell apart: the RMS distance between engine and trainer where they
hold the same weights, or between two scorings of the same tokens if that is larger. A step that moved its
tokens by less than 3 times that is indistinguishable: accepted, and said so, unless the engine is clearly
somewhere else altogether.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MOVED_SHARE = 0.1
MOVED_MIN_TOKENS = 8
RESOLVED = 3.0  # changes above so many resolutions can be judged
SLOPE_MARGIN = 0.3
MAX_RESIDUAL = 0.5
CAME_NEARER = 0.5
STOOD_STILL_SLOPE = 0.3
FLOOR = 1e-4  # 32-bit arithmetic on logprobs; nothing below it is a finding
NOTABLE_GAP = 1e-3  # below it engine and trainer are as good as equal
STALE_SHARE = 0.1


class Result(StrEnum):
    FOLLOWS = "follows"
    INDISTINGUISHABLE = "indistinguishable"
    UNCHANGED = "unchanged"
    OTHER = "other"
    STALE = "stale"

    @property
    def is_accepted(self) -> bool:
        return self in (Result.FOLLOWS, Result.INDISTINGUISHABLE)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the probe found. Lengths in nats of logprob; `slope` and `residual` None where nothing moved."""

    result: Result
    reason: str
    num_tokens: int
    moved_rms: float  # of t over the tokens that moved most
    resolution: float
    gap_rms: float  # engine after - trainer after, over all tokens
    slope: float | None
    residual: float | None

    def numbers(self) -> dict[str, Any]:
        return {**asdict(self), "result": self.result.value}


@dataclass(frozen=True, slots=True)
class _Fit:
    slope: float
    residual: float

    @property
    def is_close(self) -> bool:
        return abs(self.slope - 1) <= SLOPE_MARGIN and self.residual <= MAX_RESIDUAL


def judge_weights(
    trainer_before: Sequence[float],
    trainer_after: Sequence[float],
    engine_after: Sequence[float],
    *,
    engine_before: Sequence[float] | None = None,
    noise_rms: float = 0.0,
    known_gap_rms: float | None = None,
) -> Judgement:
    """Judge whether the engine's change follows the trainer's.

    `engine_before`: under the version that served until now, None if it was not scored. `noise_rms`: between
    two scorings of the same tokens. `known_gap_rms`: between engine and trainer on an earlier, accepted
    version.
    """
    num = len(trainer_after)
    assert len(trainer_before) == len(engine_after) == num > 0, "the probe's sequences are aligned"
    change = _minus(trainer_after, trainer_before)
    gap = _rms(_minus(engine_after, trainer_after))
    old_gap = None if engine_before is None else _rms(_minus(engine_before, trainer_before))
    # The engine may not have held `before`: then old_gap is a real difference, and an earlier gap is the
    # better guess.
    gaps = [value for value in (old_gap, known_gap_rms) if value is not None]
    resolution = max(FLOOR, noise_rms, min(gaps, default=0.0))
    moved = _moved_most(change)
    moved_rms = _rms([change[i] for i in moved])

    def judged(result: Result, reason: str, fit: _Fit | None) -> Judgement:
        slope, residual = (None, None) if fit is None else (fit.slope, fit.residual)
        return Judgement(result, reason, num, moved_rms, resolution, gap, slope, residual)

    if not all(map(math.isfinite, engine_after)):
        return judged(Result.OTHER, "the engine's logprobs are not finite", None)
    if moved_rms < RESOLVED * resolution:
        if gap > RESOLVED * max(resolution, moved_rms):
            return judged(Result.OTHER, _other(gap, resolution), None)
        seen = f"the step moved its tokens by {moved_rms:.2g}, the engine resolves {resolution:.2g}"
        return judged(Result.INDISTINGUISHABLE, f"indistinguishable from the old version: {seen}", None)

    fits = [_fit(change, _minus(engine_after, trainer_before), moved)]
    if engine_before is not None:
        fits.append(_fit(change, _minus(engine_after, engine_before), moved))
    best = min(fits, key=lambda fit: fit.residual)
    # Weights that follow on the tokens that moved and are elsewhere on the rest are other weights.
    if best.is_close and gap <= max(RESOLVED * resolution, MAX_RESIDUAL * _rms(change), FLOOR):
        result, reason = Result.FOLLOWS, f"the engine's change is {best.slope:.2f} of the trainer's"
        away = 0.0 if engine_before is None else _rms(_minus(engine_before, trainer_after))
        if not fits[-1].is_close and away > RESOLVED * resolution and gap > CAME_NEARER * away:
            result, reason = Result.UNCHANGED, f"the engine came no nearer: {gap:.2g} away, {away:.2g} before"
        elif gap > RESOLVED * max(resolution, NOTABLE_GAP):
            reason += f", but {gap:.2g} away from it, where {resolution:.2g} is usual"
        return judged(result, reason, best)
    still = fits[-1]
    if abs(still.slope) < STOOD_STILL_SLOPE and still.residual < 1 + STOOD_STILL_SLOPE:
        return judged(
            Result.UNCHANGED, f"the engine still serves the old weights (slope {still.slope:.2f})", still
        )
    return judged(Result.OTHER, _other(gap, resolution), best)


@dataclass(frozen=True, slots=True)
class PrimedPrompt:
    """The likeliest next tokens' logprobs after one long prompt, that the old version had cached.

    `old`: by the old version. `primed`, `fresh`: by the new one, through the shared cache and past it.
    """

    old: Mapping[int, float]
    primed: Mapping[int, float]
    fresh: Mapping[int, float]


def judge_cache(prompts: Sequence[PrimedPrompt], *, noise: float) -> tuple[Result, float]:
    """Whether answers through the prefix cache are those past it; and the largest difference between the two.

    Keys and values of the old version under the new weights miss the new distribution by about as much as it
    moved. `noise` is the largest difference of two such answers by one version.
    """
    moved = max((_largest(prompt.old, prompt.fresh) for prompt in prompts), default=0.0)
    missed = max((_largest(prompt.primed, prompt.fresh) for prompt in prompts), default=0.0)
    bar = max(FLOOR, RESOLVED * noise)
    if missed > max(bar, STALE_SHARE * moved):
        return Result.STALE, missed
    return (Result.FOLLOWS if moved > bar else Result.INDISTINGUISHABLE), missed


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    return _largest(one, other)


def rms_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return _rms(_minus(one, other))


def _largest(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Over the tokens that both name; two lists without a common token could not differ more."""
    common = one.keys() & other.keys()
    return max((abs(one[token] - other[token]) for token in common), default=math.inf)


def _fit(change: Sequence[float], moved_to: Sequence[float], moved: Sequence[int]) -> _Fit:
    squares = sum(change[i] ** 2 for i in moved)
    slope = sum(change[i] * moved_to[i] for i in moved) / squares
    residual = math.sqrt(sum((moved_to[i] - change[i]) ** 2 for i in moved) / squares)
    return _Fit(slope, residual)


def _moved_most(change: Sequence[float]) -> list[int]:
    count = min(len(change), max(MOVED_MIN_TOKENS, math.ceil(MOVED_SHARE * len(change))))
    return sorted(range(len(change)), key=lambda i: abs(change[i]), reverse=True)[:count]


def _other(gap: float, resolution: float) -> str:
    return (
        f"the engine serves other weights: {gap:.2g} away from the trainer's, where {resolution:.2g} is usual"
    )


def _minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0
