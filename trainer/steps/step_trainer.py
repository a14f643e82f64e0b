"""What takes single optimizer steps, as the loop sees it: how it is made from settings, which objective and
correction a step gets, and what is read off it afterwards. TRL itself is trl_bridge.py's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import LightningError, RankLostError, UserError
from ...records import Group, Logprobs, StepManifest, TokenIds
from ...settings import TrainSettings
from ..batches.packing import MicroBatch, ModelShape
from ..launch import RANK_LOST, is_follower, num_ranks
from ..report import StepLine
from . import models
from .metrics import StepMetrics
from .objective import Correction, Objective
from .schedule import Schedule


class StepTrainer(Protocol):
    """What the loop needs of trl_bridge.RecordedTrainer."""

    steps: Iterable[Sequence[MicroBatch]]
    on_micro_batch: Callable[[int, int], None]
    num_ranks: int

    @property
    def model(self) -> Any: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def metrics(self) -> StepMetrics: ...

    def train(self) -> Any: ...
    def log_figures(self, figures: Mapping[str, float]) -> None: ...
    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...
    def share(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """What this process computes of a step; the rest goes to the others."""
        ...

    def corrected(self, batches: Sequence[MicroBatch], mode: Correction, cap: float) -> list[MicroBatch]: ...
    def sequence_logprobs(self, sequences: Sequence[TokenIds], max_tokens: int) -> list[Logprobs]: ...
    def gathered(self) -> dict[str, Any] | None:
        """The trained weights, made whole; None where the model has them all."""
        ...


class RankTrainer(StepTrainer, Protocol):
    """One process's own, beside others."""

    combined: Callable[[StepMetrics], StepMetrics]

    def save_state(self, folder: Path | None) -> None:
        """None: take part in it, and write nothing."""
        ...


def objective_of(settings: TrainSettings) -> Objective:
    return Objective(
        name=settings.objective,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        ratio_cap=settings.ratio_cap,
        kl_weight=settings.kl_weight,
        entropy_weight=settings.entropy_weight,
    )


def schedule_of(settings: TrainSettings) -> Schedule:
    """Every epoch over a step's groups is an optimizer step of its own."""
    total = None if settings.max_steps is None else settings.max_steps * settings.epochs
    return Schedule(settings.lr_schedule, settings.warmup_steps, total)


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


def build_trainer(
    settings: TrainSettings, start: models.StartWeights, tokenizer: Any, folder: Path, on_gpu: bool
) -> StepTrainer:
    """Of a run of one process, or of the leader of several (ranks.py)."""
    if num_ranks() == 1:
        return _own_trainer(settings, start, tokenizer, folder, on_gpu)
    from .ranks import Begin, LeadingTrainer, Ranks

    ranks = Ranks.joined(settings, on_gpu)
    ranks.tell_all(Begin(settings, start, folder))
    return LeadingTrainer(_own_trainer(settings, start, tokenizer, folder, on_gpu), ranks)


def follow(given: TrainSettings) -> None:
    """A whole run of every rank but the first. `given` on the command line; the leader knows the run's."""
    from .ranks import Begin, Ranks, follow, followers_signals

    with followers_signals() as told, models.one_line_for_full_memory():
        try:
            on_gpu = models.use_device(given)
            ranks = Ranks.joined(given, on_gpu)
            begin = ranks.hear()
            assert isinstance(begin, Begin), "the first command"
            tokenizer = models.load_tokenizer(begin.settings.model)
            follow(_own_trainer(begin.settings, begin.start, tokenizer, begin.folder, on_gpu), ranks)
        except RankLostError:
            raise
        except LightningError as error:
            # The leader has often met the same mistake, and has said so.
            if told.wait(_LEADER_SPEAKS_SEC):
                raise RankLostError(RANK_LOST) from error
            raise


_LEADER_SPEAKS_SEC = 3.0


def _own_trainer(
    settings: TrainSettings, start: models.StartWeights, tokenizer: Any, folder: Path, on_gpu: bool
) -> RankTrainer:
    from .trl_bridge import BridgeSettings, RecordedTrainer

    bridge = BridgeSettings(
        output=folder,
        learning_rate=settings.learning_rate,
        schedule=schedule_of(settings),
        objective=objective_of(settings),
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        on_gpu=on_gpu,
        bfloat16=settings.dtype == "bfloat16",
        attention=settings.attention,
        report_to=() if is_follower() else tuple(settings.report_to),
        gradient_checkpointing=settings.gradient_checkpointing == "on"
        or (settings.gradient_checkpointing == "auto" and on_gpu),
        served_as_bfloat16=served_as_bfloat16(settings, on_gpu),
    )
    reference = models.load_reference(settings) if settings.kl_weight else None
    trainer: RankTrainer = RecordedTrainer(models.load_model(settings, start), tokenizer, bridge, reference)
    return trainer


def served_as_bfloat16(settings: TrainSettings, on_gpu: bool) -> bool:
    """Full weights are served in the precision of the base model's folder, unless on a CPU."""
    return settings.weights == "full" and on_gpu and models.stored_dtype(settings.model) == "bfloat16"


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
