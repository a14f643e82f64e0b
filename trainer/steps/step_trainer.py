"""What takes single optimizer steps, as the loop sees it, and as the ranks of a run see their own.

trl_bridge.py and ranks.py have what follows them; making.py makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...records import Logprobs, TokenIds
from ..batches.packing import MicroBatch, ModelShape
from .metrics import StepMetrics
from .objective import Correction


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
