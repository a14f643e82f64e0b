"""The step's loss written by hand, one sequence at a time: what the fast paths are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_rl.records import Transition
from lightning_rl.trainer.steps.objective import Objective

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
CLIP = Objective(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05  # TRL's, the paper's


def reference_logprobs(model: Any, t: Transition) -> torch.Tensor:
    """One sequence at a time, the model's plain forward, log_softmax at the call's temperature."""
    return all_logprobs(model, t).gather(-1, torch.tensor(list(t.completion_ids))[:, None])[:, 0]


def all_logprobs(model: Any, t: Transition) -> torch.Tensor:
    """(T, vocabulary) at the positions that predict the completion."""
    ids = torch.tensor([[*t.prompt_ids, *t.completion_ids]])
    logits = model(input_ids=ids).logits[0, len(t.prompt_ids) - 1 : -1].float() / t.temperature
    return torch.log_softmax(logits, -1)


def loss_by_hand(
    model: Any, transitions: list[Transition], objective: Objective = CLIP, reference: Any = None
) -> torch.Tensor:
    """`reference(t)` gives the reference model's logprobs of a transition, for the KL term."""
    total = torch.zeros(())
    for t in transitions:
        rows = all_logprobs(model, t)
        logps = rows.gather(-1, torch.tensor(list(t.completion_ids))[:, None])[:, 0]
        ratio = torch.exp(logps - torch.tensor(list(t.behavior_logprobs)))
        loss = _policy_loss(ratio, logps, t.advantage, objective)
        if objective.kl_weight:
            apart = reference(t) - logps
            loss = loss + objective.kl_weight * (apart.exp() - apart - 1)
        loss = loss - objective.entropy_weight * -(rows.exp() * rows).sum(-1)
        total = total + t.multiplier * loss.sum()
    return total


def weight_by_hand(weighting: str, tokens_of: Mapping[str, int], episode: str, constant: int) -> float:
    """What one token of the episode weighs; `tokens_of`: trained tokens of each trained episode."""
    if weighting == "episode":
        return 1 / len(tokens_of) / tokens_of[episode]
    return 1 / sum(tokens_of.values()) if weighting == "token" else 1 / len(tokens_of) / constant


def _policy_loss(
    ratio: torch.Tensor, logps: torch.Tensor, advantage: float, objective: Objective
) -> torch.Tensor:
    """(T,)"""
    if objective.name == "cispo":
        return -ratio.clamp(max=objective.ratio_cap).detach() * advantage * logps
    if objective.name == "sapo":
        tau = SAPO_TAU_POSITIVE if advantage > 0 else SAPO_TAU_NEGATIVE
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    if objective.name == "gspo":
        ratio = torch.exp(torch.log(ratio).mean()).expand_as(ratio)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)
