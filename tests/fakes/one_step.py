"""One step's gradient, by the bridge and by hand, over transitions with ratios clear of the clip's edges."""

from __future__ import annotations

import random
from typing import Any

import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.reference_loss import CLIP_HIGH, CLIP_LOW, loss_by_hand, reference_logprobs
from peft import LoraConfig, get_peft_model

from lightning_rl.records import Transition
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer


def adapted() -> Any:
    """A tiny model with an adapter that has learnt something."""
    made = get_peft_model(
        tiny_models.qwen3(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made


def make_trainer(model: Any, folder: Any, **changes: Any) -> RecordedTrainer:
    settings = {
        "output": folder,
        "learning_rate": 1e-3,
        "objective": Objective(clip_low=CLIP_LOW, clip_high=CLIP_HIGH),
        "max_grad_norm": 1.0,
        "seed": 0,
        "on_gpu": False,
        "bfloat16": False,
    }
    return RecordedTrainer(model, tiny_models.tokenizer(), BridgeSettings(**{**settings, **changes}))


def recorded(model: Any, *, temperatures=(1.0, 0.7), drift: float = 0.3) -> list[Transition]:
    """Two groups of forked two-call episodes whose logprobs lie off the model's, clear of the clip."""
    rng = random.Random(5)
    made = []
    for group in range(2):
        prompt = [3, 4, 5, *(rng.randrange(6, 60) for _ in range(5 + group))]
        for episode in range(4):
            answer = [rng.choice([7, 8]) for _ in range(4)]
            follow = [*prompt, *answer, 9, *(rng.randrange(6, 60) for _ in range(3))]
            for call, (before, after) in enumerate(((prompt, answer), (follow, [11, 12][: 1 + episode % 2]))):
                t = transition(
                    f"{group}-{episode}-{call}",
                    before,
                    after,
                    temperature=temperatures[episode % len(temperatures)],
                    advantage=rng.choice([-1.5, -0.5, 0.8, 2.0]),
                    multiplier=rng.uniform(0.01, 0.1),
                )
                with torch.no_grad():
                    policy = reference_logprobs(model, t).tolist()
                behavior = [p + _off_the_edges(rng, drift) for p in policy]
                made.append(
                    transition(
                        t.call_id,
                        before,
                        after,
                        behavior=behavior,
                        temperature=t.temperature,
                        advantage=t.advantage,
                        multiplier=t.multiplier,
                    )
                )
    return made


def _off_the_edges(rng: random.Random, drift: float) -> float:
    """A log ratio that is not within 0.02 of where the clip sets in."""
    while True:
        value = rng.uniform(-drift, drift)
        if all(abs(value - edge) > 0.02 for edge in (0.2231, -0.2469)):  # -log(0.8), -log(1.28)
            return value


def gradient(model: Any) -> torch.Tensor:
    return torch.cat(
        [p.grad.reshape(-1) for p in model.parameters() if p.requires_grad and p.grad is not None]
    ).clone()


def step_gradient(trainer: RecordedTrainer, batches: Any) -> tuple[torch.Tensor, float]:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, {"micro_batches": batches})
    return gradient(trainer.model), float(loss)


def hand_gradient(model: Any, transitions: list[Transition]) -> tuple[torch.Tensor, float]:
    model.zero_grad()
    loss = loss_by_hand(model, transitions)
    loss.backward()
    return gradient(model), loss.item()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
