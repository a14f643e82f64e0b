"""Several ranks of one run, one process each: rank 0 leads, the others follow it.

The leader alone knows the log; it plans, scores, saves and reports. What every rank has to take part in,
because their passes, or the gathering of sharded weights, meet, it sends them as commands, to each its own
part of the step's micro-batches. Commands go over a group of their own: a follower waits there as long as the
leader does for new groups or a verdict. Where ranks compute together, none waits longer than
`rank_timeout_sec`.

Knows neither the loss nor the log.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed

from ...errors import RankLostError
from ...records import Logprobs, TokenIds
from ...settings.train import TrainSettings
from ..batches.packing import MicroBatch, ModelShape, dealt
from ..launch import LOST, RANK_LOST
from .metrics import StepMetrics
from .models import StartWeights
from .objective import Correction
from .sharding import is_sharded
from .step_trainer import RankTrainer

_LEADER = 0
_AS_LONG_AS_THE_LEADER = timedelta(days=365)


# Commands, in the order in which a run sends them.


@dataclass(frozen=True, slots=True)
class Begin:
    """Build the trainer."""

    settings: TrainSettings
    start: StartWeights
    folder: Path


@dataclass(frozen=True, slots=True)
class Score:
    sequences: Sequence[TokenIds]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """Your part of the next step."""

    batches: Sequence[MicroBatch]


@dataclass(frozen=True, slots=True)
class Correct:
    mode: Correction
    cap: float


@dataclass(frozen=True, slots=True)
class Step:
    pass


@dataclass(frozen=True, slots=True)
class GatherWeights:
    pass


@dataclass(frozen=True, slots=True)
class SaveState:
    pass


@dataclass(frozen=True, slots=True)
class LoadState:
    folder: Path


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Begin | Score | Share | Correct | Step | GatherWeights | SaveState | LoadState | Stop


class Ranks:
    """This process's place among the others, once they have found each other."""

    def __init__(self, patience: timedelta) -> None:
        """`patience`: how long the leader waits until a follower takes a command."""
        self.number, self.count = distributed.get_rank(), distributed.get_world_size()
        timeout = patience if self.number == _LEADER else _AS_LONG_AS_THE_LEADER
        self._commands = distributed.new_group(backend="gloo", timeout=timeout)

    @classmethod
    def joined(cls, settings: TrainSettings, on_gpu: bool) -> Self:
        """Wait for the others."""
        from accelerate import PartialState

        patience = timedelta(seconds=settings.rank_timeout_sec)
        with one_line_for_lost_ranks():
            PartialState(cpu=not on_gpu, timeout=patience)
            return cls(patience)

    def tell(self, commands: Sequence[Command]) -> None:
        """One command for each rank, the leader's own included."""
        assert self.number == _LEADER, "only the leader tells"
        distributed.scatter_object_list([None], list(commands), src=_LEADER, group=self._commands)

    def tell_all(self, command: Command) -> None:
        self.tell([command] * self.count)

    def hear(self) -> Command:
        heard: list[Command | None] = [None]
        distributed.scatter_object_list(heard, None, src=_LEADER, group=self._commands)
        assert heard[0] is not None, "the leader has told"
        return heard[0]

    def summed(self, own: StepMetrics) -> StepMetrics:
        """The step's metrics over all ranks, on every rank."""
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, own, group=self._commands)
        return StepMetrics(
            **{
                field.name: (max if field.name in _MAXIMA else sum)(getattr(one, field.name) for one in found)
                for field in fields(StepMetrics)
            }
        )

    def leave(self) -> None:
        """At a run's end. Groups of gloo are left to the end of the process: destroying one waits for its
        threads while it holds the interpreter's lock, which these may be waiting for."""
        if distributed.get_backend() != "gloo":
            distributed.destroy_process_group()


_MAXIMA = ("gap_max", "grad_norm", "learning_rate")


class LeadingTrainer:
    """What the loop takes steps with on rank 0: a StepTrainer whose doings the followers share."""

    def __init__(self, trainer: RankTrainer, ranks: Ranks) -> None:
        self._trainer, self._ranks = trainer, ranks
        self.num_ranks = ranks.count
        trainer.combined = ranks.summed

    @property
    def model(self) -> Any:
        return self._trainer.model

    @property
    def metrics(self) -> StepMetrics:
        return self._trainer.metrics

    @property
    def on_micro_batch(self) -> Callable[[int, int], None]:
        return self._trainer.on_micro_batch

    @on_micro_batch.setter
    def on_micro_batch(self, value: Callable[[int, int], None]) -> None:
        self._trainer.on_micro_batch = value

    @property
    def steps(self) -> Iterable[Sequence[MicroBatch]]:
        return self._trainer.steps

    @steps.setter
    def steps(self, value: Iterable[Sequence[MicroBatch]]) -> None:
        self._trainer.steps = self._led(value)

    def _led(self, steps: Iterable[Sequence[MicroBatch]]) -> Iterator[Sequence[MicroBatch]]:
        for batches in steps:
            self._ranks.tell_all(Step())
            yield batches
        self._ranks.tell_all(Stop())

    def train(self) -> Any:
        with one_line_for_lost_ranks():
            self._trainer.train()
            self._ranks.leave()

    @property
    def shape(self) -> ModelShape:
        return self._trainer.shape

    def log_figures(self, figures: Mapping[str, float]) -> None:
        self._trainer.log_figures(figures)

    def save_state(self, folder: Path) -> None:
        if is_sharded(self.model):
            self._ranks.tell_all(SaveState())
        self._trainer.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self._ranks.tell_all(LoadState(folder))
        self._trainer.load_state(folder)

    def share(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        parts = dealt(batches, self.shape, self._ranks.count)
        self._ranks.tell([Share(part) for part in parts])
        return parts[_LEADER]

    def corrected(self, batches: Sequence[MicroBatch], mode: Correction, cap: float) -> list[MicroBatch]:
        self._ranks.tell_all(Correct(mode, cap))
        return self._trainer.corrected(batches, mode, cap)

    def sequence_logprobs(self, sequences: Sequence[TokenIds], max_tokens: int) -> list[Logprobs]:
        if is_sharded(self.model):
            self._ranks.tell_all(Score(sequences, max_tokens))
        return self._trainer.sequence_logprobs(sequences, max_tokens)

    def gathered(self) -> dict[str, torch.Tensor] | None:
        if not is_sharded(self.model):
            return None
        self._ranks.tell_all(GatherWeights())
        return self._trainer.gathered()


def follow(trainer: RankTrainer, ranks: Ranks) -> None:
    """Do what the leader says until it says stop. RankLostError where it is gone."""
    trainer.combined = ranks.summed
    trainer.steps = _followed(trainer, ranks)
    with one_line_for_lost_ranks():
        trainer.train()
        ranks.leave()


def _followed(trainer: RankTrainer, ranks: Ranks) -> Iterator[Sequence[MicroBatch]]:
    share: Sequence[MicroBatch] = ()
    while True:
        match ranks.hear():
            case Share(batches):
                share = batches
            case Correct(mode, cap):
                share = trainer.corrected(share, mode, cap)
            case Step():
                yield share
            case Score(sequences, max_tokens):
                trainer.sequence_logprobs(sequences, max_tokens)
            case GatherWeights():
                trainer.gathered()
            case SaveState():
                trainer.save_state(None)
            case LoadState(folder):
                trainer.load_state(folder)
            case Stop():
                return
            case Begin():
                raise AssertionError("a run begins once")


@contextmanager
def one_line_for_lost_ranks() -> Iterator[None]:
    """RankLostError where a collective operation fails because another rank is gone, or too late."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "timed out" in said.lower():
            raise RankLostError(
                "another process of this run has not answered for rank_timeout_sec, so the run has ended; "
                "the log and every version are whole"
            ) from error
        if isinstance(error, distributed.DistError) or any(
            name in said for name in ("gloo", "NCCL", "closed")
        ):
            raise RankLostError(RANK_LOST) from error
        raise


_GRACE_SEC = 10.0


@contextmanager
def followers_signals() -> Iterator[threading.Event]:
    """A follower leaves the end to its leader, which reports it and needs the passes in progress to come to
    their end. It goes by itself when that has taken too long. The event is set when a signal has come.

    A thread waits for the signals, since Python's own handlers do not run while a collective operation does.
    """
    told = threading.Event()
    wanted = {signal.SIGINT, signal.SIGTERM}

    def wait() -> None:
        signal.sigwait(wanted)
        told.set()
        threading.Event().wait(_GRACE_SEC)
        os._exit(LOST)

    had = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield told
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, had)
