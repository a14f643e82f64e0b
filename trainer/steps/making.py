"""How what takes a run's steps is made from its settings: in a run of one process, and in each of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import LightningError, RankLostError
from ...settings.train import TrainSettings
from ..launch import RANK_LOST, is_follower, num_ranks
from . import models
from .objective import Objective
from .schedule import Schedule
from .step_trainer import RankTrainer, StepTrainer


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
