"""What is read off a step: its line's figures, what people are told of them, and which correction it needs.

Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import UserError
from ..records import Group, StepManifest
from ..settings.train import TrainSettings
from .report import StepLine
from .steps.metrics import StepMetrics
from .steps.objective import Correction
from .steps.values import Measured


def correction_of(settings: TrainSettings, manifest: StepManifest, groups: Sequence[Group]) -> Correction:
    """`auto` is decided by the step: a correction costs a forward pass, and on-policy it corrects nothing."""
    if settings.correction != "auto":
        return settings.correction
    lags = lags_behind(manifest, groups)
    return "truncate" if lags or settings.epochs > 1 else "off"


def lags_behind(manifest: StepManifest, groups: Sequence[Group]) -> bool:
    """Whether a trained call is of other weights than those that the step starts from."""
    trained = {choice.call_id for choice in manifest.choices if choice.advantage is not None}
    return any(
        call.policy_version != manifest.from_version
        for group in groups
        for episode in group.episodes
        for call in episode.calls
        if call.id in trained
    )


MUCH_ROUNDED_AWAY = 0.5
MUCH_GAP = 0.1  # nats; the same weights are below 0.02 apart, 16 bits included


def rounding_notice(line: StepLine, settings: TrainSettings) -> str | None:
    """One line where bfloat16 rounds most of a step away."""
    if line.rounded_away is None or line.rounded_away < MUCH_ROUNDED_AWAY:
        return None
    share = f"step {line.step}: {line.rounded_away:.0%} of the weights that had a gradient did not move"
    larger = f"a larger --learning-rate than {line.lr:g}"
    if settings.dtype == "bfloat16":
        return f"{share}: bfloat16 rounds it away; use --dtype float32, --weights lora or {larger}"
    return (
        f"{share} once they are rounded to bfloat16, as an engine serves this model by default; nothing is "
        f"lost between steps; to see each one start the engine in float32, or use --weights lora or {larger}"
    )


def gap_notice(line: StepLine, *, lags: bool) -> str | None:
    """One line where the very weights that sampled are not the ones that are trained."""
    if lags or line.gap_mean is None or line.gap_mean < MUCH_GAP:
        return None
    return (
        f"step {line.step}: the engine's logprobs and the trainer's are {line.gap_mean:.2g} nats per token "
        f"apart, though the log says that version {line.from_version} sampled: is --model the model that the "
        "engine serves, and are its logprobs the processed ones (lightning engine check)?"
    )


def require_finite(metrics: StepMetrics, step: int) -> None:
    if not math.isfinite(metrics.grad_norm or 0.0):
        raise UserError(
            f"the gradient of step {step} is not finite, so nothing was saved: lower --learning-rate, or "
            "look at the step's manifest for odd rewards"
        )


def require_finite_critic(taught: Measured, step: int) -> None:
    if not (math.isfinite(taught.loss) and math.isfinite(taught.grad_norm)):
        raise UserError(
            f"the critic's loss or gradient of step {step} is not finite, so nothing was saved: lower "
            "critic_learning_rate, or look at the step's manifest for odd rewards"
        )


def timed(line: StepLine, train_sec: float) -> StepLine:
    """Per second of the whole step, all epochs and the correction's forward pass included."""
    assert line.call_tokens_per_sec is not None, "the first epoch was measured"
    assert line.unique_tokens_per_sec is not None, "the first epoch was measured"
    return replace(
        line,
        call_tokens_per_sec=line.call_tokens_per_sec / train_sec,
        unique_tokens_per_sec=line.unique_tokens_per_sec / train_sec,
        train_sec=train_sec,
    )


def measured(line: StepLine, metrics: StepMetrics, micro_batches: int) -> StepLine:
    """What the first epoch says; tokens are yet to be divided by the step's seconds."""
    return replace(
        line,
        gap_mean=metrics.gap_mean,
        gap_max=metrics.gap_max,
        clip_fraction=metrics.clip_fraction,
        entropy_mean=metrics.entropy_mean,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        lr=metrics.learning_rate,
        rounded_away=metrics.rounded_away,
        kl_mean=metrics.kl_mean,
        call_tokens_per_sec=float(metrics.call_tokens),
        unique_tokens_per_sec=float(metrics.unique_tokens),
        micro_batches=micro_batches,
    )
