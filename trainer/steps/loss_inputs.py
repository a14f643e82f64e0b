"""A micro-batch as the tensors that TRL's loss reads: (B, C), one row per choice.

Knows the names and shapes that the loss expects and what it divides by; the loss itself is trl_bridge.py's.
"""

from __future__ import annotations

from typing import Any

import torch

from ..batches.packing import MicroBatch
from .objective import Objective
from .scoring import on_device


def loss_inputs(
    batch: MicroBatch, device: Any, objective: Objective, num_ranks: int
) -> dict[str, torch.Tensor]:
    """The prompt part is empty: scoring does not read it. `num_ranks`: those whose gradients are averaged."""
    terms = batch.terms
    shape = (len(batch.choices), int(terms.column.max()) + 1)
    place = (on_device(terms.row, device), on_device(terms.column, device))

    def rows(values: Any) -> torch.Tensor:
        flat = on_device(values, device)
        return torch.zeros(shape, dtype=flat.dtype, device=device).index_put(place, flat)

    advantages = rows(terms.advantage * terms.multiplier)
    if objective.name == "sapo":  # TRL takes the mean over a row's tokens, then over rows, of one rank
        lengths = torch.bincount(place[0], minlength=shape[0])
        advantages *= lengths[:, None] * (shape[0] * num_ranks)
    empty = torch.zeros((shape[0], 0), dtype=torch.long, device=device)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": rows(terms.target),
        "completion_mask": torch.zeros(shape, dtype=torch.long, device=device).index_put(
            place, torch.ones_like(place[0])
        ),
        "advantages": advantages,
        "old_per_token_logps": rows(terms.old_logprob),
        "num_items_in_batch": torch.ones((), device=device),
    }
