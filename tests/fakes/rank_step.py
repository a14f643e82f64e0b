"""A program: optimizer steps of tiny models over made-up calls, in as many ranks as it was started in.

    python -m torch.distributed.run --nproc-per-node 2 tests/fakes/rank_step.py OUT \
      '{"name": {"weights": "lora"}}'

Rank 0 writes to OUT, for each name, the gradient of the step (as the optimizer sees it), the weights after
it, logprobs of a sequence with these, and the metrics.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.reference_loss import reference_logprobs
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from lightning_rl.records import Transition, token_ids
from lightning_rl.trainer.batches.packing import MicroBatch, cheapest_batches
from lightning_rl.trainer.launch import is_follower, num_ranks
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.ranks import LeadingTrainer, Ranks, follow
from lightning_rl.trainer.steps.sharding import is_sharded
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer

SEQUENCE = token_ids([3, 4, 5, 6, 7, 8])


def recorded(model: Any) -> list[Transition]:
    """Groups of forked two-call episodes of very different lengths, their log ratios clear of the clip's
    edges."""
    rng = random.Random(5)
    made = []
    for group, num_tokens in enumerate((3, 9, 40)):
        prompt = [3, 4, 5, *(rng.randrange(6, 60) for _ in range(num_tokens))]
        for episode in range(3):
            answer = [rng.choice([7, 8]) for _ in range(4)]
            follow_up = [*prompt, *answer, 9, *(rng.randrange(6, 60) for _ in range(3))]
            for call, (before, after) in enumerate(
                ((prompt, answer), (follow_up, [11, 12][: 1 + episode % 2]))
            ):
                bare = transition(
                    f"{group}-{episode}-{call}", before, after, temperature=(1.0, 0.7)[episode % 2]
                )
                with torch.no_grad():
                    policy = reference_logprobs(model, bare).tolist()
                made.append(
                    transition(
                        bare.call_id,
                        before,
                        after,
                        behavior=[min(0.0, p - rng.choice([-0.3, -0.1, 0.1, 0.3])) for p in policy],
                        temperature=bare.temperature,
                        advantage=rng.choice([-1.5, -0.5, 0.8, 2.0]),
                        multiplier=rng.uniform(0.01, 0.1),
                    )
                )
    return made


class Captured(TrainerCallback):
    """The gradient as it is when the optimizer steps."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.gradient[name.removeprefix("module.")] = grad.detach().clone()


def step(
    ranks: Ranks | None,
    folder: Path,
    *,
    weights: str,
    kl: float = 0.0,
    checkpointing: bool = False,
    max_tokens: int = 60,
    correction: str = "off",
    num_calls: int | None = None,
    objective: str = "clip",
) -> dict[str, Any]:
    """What rank 0 found; nothing in another rank."""
    model, reference = tiny_models.llama(), tiny_models.llama(seed=7)
    if weights == "lora":
        model, reference = lora(model), None
    made = recorded(model)[:num_calls]
    settings = BridgeSettings(
        output=folder,
        learning_rate=1e-2,
        objective=Objective(objective, kl_weight=kl),
        max_grad_norm=1e6,
        seed=0,
        on_gpu=False,
        bfloat16=False,
        gradient_checkpointing=checkpointing,
    )
    trainer = RecordedTrainer(model, tiny_models.tokenizer(), settings, reference if kl else None)
    captured = Captured()
    trainer.add_callback(captured)
    if ranks is not None and is_follower():
        follow(trainer, ranks)
        return {}
    leader = trainer if ranks is None else LeadingTrainer(trainer, ranks)
    found: dict[str, Any] = {}

    def steps() -> Iterator[Sequence[MicroBatch]]:
        batches = cheapest_batches(made, max_tokens, leader.shape, leader.num_ranks)
        share = leader.share(batches)
        found["num_batches"], found["num_own"] = len(batches), len(share)
        if correction != "off":
            share = leader.corrected(share, correction, 1.1)
        yield share
        found["sharded"] = is_sharded(leader.model)
        found["metrics"] = asdict(leader.metrics)
        found["after"] = [list(values) for values in leader.sequence_logprobs([SEQUENCE], max_tokens)]
        state = leader.gathered()
        if state is None:
            state = {n: p for n, p in leader.model.named_parameters() if p.requires_grad}
        found["weights"] = {name: value.detach().clone() for name, value in state.items()}

    leader.steps = steps()
    leader.train()
    return found | {"gradient": captured.gradient}


def lora(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def main(out: Path, asked: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.joined(SimpleNamespace(rank_timeout_sec=120), on_gpu=False) if num_ranks() > 1 else None
    found = {name: step(ranks, out.parent, **one) for name, one in asked.items()}
    if not is_follower():
        torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)  # see Ranks.leave
