"""What a micro-batch's logprobs say about the step: how far they are from the recorded ones, how many tokens
the objective no longer pulls at."""

from __future__ import annotations

import torch

from ..batches.packing import MicroBatch
from ..batches.tree import TreeBatch
from .metrics import StepMetrics
from .objective import Objective
from .scoring import on_device


def measure(
    metrics: StepMetrics,
    batch: MicroBatch,
    logps: torch.Tensor,
    entropies: torch.Tensor,
    objective: Objective,
) -> None:
    """Add the micro-batch's figures; `logps` and `entropies` are (M,), one per loss term."""
    if batch.call_tokens == 0:  # without weight (packing.dealt)
        return
    terms = batch.terms
    gap = (logps - on_device(terms.behavior_logprob, logps.device)).abs()
    metrics.num_tokens += len(terms)
    metrics.unique_tokens += (
        batch.input_ids.size if isinstance(batch, TreeBatch) else int(batch.attention_mask.sum())
    )
    metrics.call_tokens += batch.call_tokens
    metrics.gap_sum += float(gap.sum())
    metrics.gap_max = max(metrics.gap_max, float(gap.max()))
    metrics.num_clipped += int(is_clipped(batch, logps, objective).sum())
    metrics.entropy_sum += float(entropies.sum())


def is_clipped(batch: MicroBatch, logps: torch.Tensor, objective: Objective) -> torch.Tensor:
    """(M,) whether the objective stops pulling at this token."""
    terms, device = batch.terms, logps.device
    log_ratio = logps - on_device(terms.old_logprob, device)
    if objective.name == "sapo":  # it fades, and never stops
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if objective.name == "cispo":
        return log_ratio.exp() > objective.ratio_cap
    if objective.name == "gspo":
        row = on_device(terms.row, device)
        sums = log_ratio.new_zeros(len(batch.choices)).index_add(0, row, log_ratio)
        log_ratio = (sums / torch.bincount(row, minlength=len(sums)))[row]
    ratio, advantage = log_ratio.exp(), on_device(terms.advantage, device)
    high = (ratio > 1 + objective.clip_high) & (advantage > 0)
    return high | ((ratio < 1 - objective.clip_low) & (advantage < 0))
