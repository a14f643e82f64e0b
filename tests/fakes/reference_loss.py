"""The step's loss written by hand, one sequence at a time: what the fast paths are compared with."""

from __future__ import annotations

from typing import Any

import torch

from lightning_rl.records import Transition

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def reference_logprobs(model: Any, t: Transition) -> torch.Tensor:
    """One sequence at a time, the model's plain forward, log_softmax at the call's temperature."""
    ids = torch.tensor([[*t.prompt_ids, *t.completion_ids]])
    logits = model(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1].float() / t.temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(t.prompt_ids) :, None])[:, 0]


def loss_by_hand(model: Any, transitions: list[Transition]) -> torch.Tensor:
    total = torch.zeros(())
    for t in transitions:
        ratio = torch.exp(reference_logprobs(model, t) - torch.tensor(list(t.behavior_logprobs)))
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        total = total - t.multiplier * torch.minimum(ratio * t.advantage, clipped * t.advantage).sum()
    return total
