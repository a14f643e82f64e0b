"""One optimizer step's gradient, through the trainer and by hand, over the same recorded episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.reference_loss import loss_by_hand, reference_logprobs, weight_by_hand
from peft import LoraConfig, get_peft_model

from lightning_rl.records import Transition, logprobs
from lightning_rl.trainer.planning.weights import TrainedChoice, Weighting, multipliers
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer

CONSTANT_TOKENS = 50
EDGE = 0.01  # no log ratio lies closer than this to where a clip sets in

OBJECTIVES = {
    "clip": Objective(kl_weight=0.3, entropy_weight=0.05),
    "gspo": Objective("gspo", clip_low=0.03, clip_high=0.04, kl_weight=0.3, entropy_weight=0.05),
    "cispo": Objective("cispo", ratio_cap=1.2, kl_weight=0.3, entropy_weight=0.05),
    "sapo": Objective("sapo", kl_weight=0.3, entropy_weight=0.05),
}
"""KL and entropy on, so that every term of the loss is there."""


def make_model(weights: str) -> Any:
    """Tied embeddings for full weights, untied ones under the adapter."""
    if weights == "full":
        return tiny_models.qwen3()
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny_models.llama(), adapter)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def make_trainer(model: Any, folder: Path, objective: Objective, **changes: Any) -> RecordedTrainer:
    """For full weights with a reference model beside it, as a KL weight needs."""
    settings: dict[str, Any] = {
        "output": folder,
        "learning_rate": 1e-3,
        "objective": objective,
        "max_grad_norm": 1.0,
        "seed": 0,
        "on_gpu": False,
        "bfloat16": False,
    }
    beside = None if hasattr(model, "get_base_model") else reference_model().to(model.dtype)
    trainer = RecordedTrainer(
        model, tiny_models.tokenizer(), BridgeSettings(**{**settings, **changes}), beside
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.args.gradient_checkpointing:  # as train() does, which these tests go around
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


def reference_model() -> Any:
    return tiny_models.qwen3(seed=7)


def step_gradient(trainer: RecordedTrainer, batches: Any) -> tuple[torch.Tensor, float]:
    loss = trainer.training_step(trainer.model, {"micro_batches": batches})
    return take_gradient(trainer.model), float(loss)


def hand_gradient(
    model: Any, transitions: Sequence[Transition], objective: Objective
) -> tuple[torch.Tensor, float]:
    beside = None if hasattr(model, "get_base_model") else reference_model()

    def reference(t: Transition) -> torch.Tensor:
        with torch.no_grad():
            if beside is not None:
                return reference_logprobs(beside, t)
            with model.disable_adapter():
                return reference_logprobs(model, t)

    loss = loss_by_hand(model, list(transitions), objective, reference)
    loss.backward()
    return take_gradient(model), loss.item()


def take_gradient(model: Any) -> torch.Tensor:
    found = [p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


_PLAYED: Sequence[tuple[str, str, Sequence[int], Sequence[int], float, float, Sequence[float]]] = (
    # episode, call, prompt, completion, temperature, advantage, log ratio of each token
    ("a", "a0", (3, 4, 5, 6), (11, 12, 13), 1.0, 1.5, (0.05, 0.35, 0.05)),
    ("a", "a1", (3, 4, 5, 6, 11, 12, 13, 9, 20), (14, 15), 1.0, 1.5, (-0.35, -0.05)),
    # as a0, the same tokens at another temperature with other recorded logprobs
    ("b", "b0", (3, 4, 5, 6), (11, 12, 13), 0.7, -0.8, (-0.35, 0.35, -0.05)),
    # and once more at the temperature of a0: one row of the head, two loss terms
    ("c", "c0", (3, 4, 5, 6), (11, 12, 18), 1.0, -1.2, (0.35, 0.05, 0.05)),
    ("c", "c1", (3, 4, 5, 6, 11, 12, 18, 9), (21,), 1.3, -1.2, (-0.35,)),
    ("c", "c2", (3, 4, 5, 6, 30, 31), (22, 23, 24, 25), 1.3, -1.2, (0.05, -0.35, 0.05, 0.35)),
    # another task
    ("d", "d0", (40, 41), (11,), 1.0, 0.4, (0.35,)),
    ("d", "d1", (40, 41, 11, 9, 42, 43, 44), (12, 13, 14, 15), 0.7, 0.4, (0.35, 0.35, -0.05, -0.05)),
    ("e", "e0", (40, 41), (50, 51), 0.7, -0.4, (-0.05, -0.05)),
)


def recorded(model: Any, weighting: Weighting, *, by_hand: bool = False) -> list[Transition]:
    """What a log and a plan would give: recorded logprobs off the model's by the ratios of `_PLAYED`."""
    made = []
    weights = _by_hand(weighting) if by_hand else _planned(weighting)
    for _, name, prompt, completion, temperature, advantage, ratios in _PLAYED:
        t = transition(
            name, prompt, completion, temperature=temperature, advantage=advantage, multiplier=weights[name]
        )
        with torch.no_grad():
            policy = reference_logprobs(model, t).tolist()
        behavior = [p - ratio for p, ratio in zip(policy, ratios, strict=True)]
        made.append(replace(t, behavior_logprobs=logprobs(behavior)))
    return made


def _planned(weighting: Weighting) -> dict[str, float]:
    trained = {(row[1], 0): TrainedChoice(row[0], len(row[3])) for row in _PLAYED}
    return {name: weight for (name, _), weight in multipliers(trained, weighting, CONSTANT_TOKENS).items()}


def _by_hand(weighting: str) -> dict[str, float]:
    tokens_of: Counter[str] = Counter()
    for row in _PLAYED:
        tokens_of[row[0]] += len(row[3])
    return {row[1]: weight_by_hand(weighting, tokens_of, row[0], CONSTANT_TOKENS) for row in _PLAYED}


def distance_to_edges(objective: Objective) -> float:
    """Of the log ratio that lies closest to where the objective's clip sets in."""
    if objective.name == "sapo":
        return math.inf
    if objective.name == "gspo":
        seen = [sum(row[-1]) / len(row[-1]) for row in _PLAYED]
    else:
        seen = [ratio for row in _PLAYED for ratio in row[-1]]
    edges = {"cispo": [objective.ratio_cap]}.get(
        objective.name, [1 - objective.clip_low, 1 + objective.clip_high]
    )
    return min(abs(value - math.log(edge)) for value in seen for edge in edges)


def num_clipped(objective: Objective) -> Mapping[str, int]:
    """How many loss terms are on this and on that side of the clip: both are in the test."""
    if objective.name == "gspo":
        seen = [sum(row[-1]) / len(row[-1]) for row in _PLAYED for _ in row[-1]]
    else:
        seen = [ratio for row in _PLAYED for ratio in row[-1]]
    cap = objective.ratio_cap if objective.name == "cispo" else 1 + objective.clip_high
    return Counter("above" if value > math.log(cap) else "below" for value in seen)
