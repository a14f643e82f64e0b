"""Whether a step still moves what it trains, once that is rounded to bfloat16.

bfloat16 keeps eight bits of a number: a weight of 0.02 has its neighbours 0.00012 away, and a step of 1e-5
leaves it where it was. Nothing fails then, the loss looks well, and the policy never moves. So the weights
that had a gradient are compared before and after the optimizer's step, a few thousand of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from .metrics import StepMetrics

SAMPLED_PER_TENSOR = 4096


@dataclass(frozen=True, slots=True)
class _Sample:
    parameter: torch.Tensor
    before: torch.Tensor  # bfloat16
    is_pulled: torch.Tensor  # bool: its gradient is not zero


class RoundingWatch(TrainerCallback):  # type: ignore[misc]
    """Weights in bfloat16 are watched in any case; with `served_as_bfloat16` the others as they will be
    served."""

    def __init__(self, metrics: Callable[[], StepMetrics], *, served_as_bfloat16: bool) -> None:
        self._metrics, self._served_as_bfloat16 = metrics, served_as_bfloat16
        self._samples: list[_Sample] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            if parameter.grad is not None and self._is_watched(parameter):
                pulled = _sampled(parameter.grad) != 0
                self._samples.append(_Sample(parameter, _rounded(parameter), pulled))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = self._metrics()
        for sample in self._samples:
            stayed = _rounded(sample.parameter) == sample.before
            metrics.num_pulled += int(sample.is_pulled.sum())
            metrics.num_unmoved += int((stayed & sample.is_pulled).sum())
        self._samples = []

    def _is_watched(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 or self._served_as_bfloat16


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Evenly spread over the tensor; of one that is sharded over ranks, this rank's part."""
    own = values.to_local() if hasattr(values, "to_local") else values
    flat = own.detach().reshape(-1)
    return flat[:: flat.numel() // SAMPLED_PER_TENSOR | 1]  # odd, so that it is no column of the tensor


def _rounded(parameter: torch.Tensor) -> torch.Tensor:
    return _sampled(parameter).to(torch.bfloat16, copy=True)
