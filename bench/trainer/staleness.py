"""`make bench-staleness`: how far the gradient from older episodes is from the true one, with and without a
correction.

The world is small enough to count: four tasks, a vocabulary of eight, answers of four tokens, a reward in
closed form. So the true gradient of the expected reward, under the weights of now, is a sum over all 4,096
answers of each task, and nothing about it is estimated. The estimates are the product's own: recorded
episodes of an older version, the clipped objective, `trainer.corrected`, one optimizer step's gradient.

Each seed plays episodes with its first weights, takes optimizer steps on fresh episodes, and after some of
them holds the estimates from the first weights' episodes against the truth. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Before torch is imported: one process per core, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

VOCABULARY = 8
ANSWER_TOKENS = 4
TASKS = 4
SIBLINGS = 8
LAGS = (1, 2, 4, 8)  # optimizer steps between the episodes and the weights of now
MAIN_LAG = 4
GROUPS = {"few": 8, "many": 128}  # one step's default number of groups, and enough for the noise to fade
MAIN_SIZE = "many"
LEARNING_RATE = 5e-4
CAP = 2.0  # correction_cap's default
WAYS = ("ignored", "off", "truncate", "mask", "fresh")
"""ignored: as if the episodes were of now. off, truncate, mask: the setting `correction`. fresh: as many
episodes of the weights of now, which is what noise alone does."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One estimate against the truth."""

    seed: int
    lag: int
    size: str
    way: str
    distance: float  # |estimate - truth| / |truth|
    cosine: float
    gap: float  # mean |log ratio| of a token


def new_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_rl.trainer.steps import attention

    attention.register()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=attention.NAME,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():  # so that what came before matters to a token's probability
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


class World:
    """Prompts, rewards and the exact gradient. Tasks and their words are the same for every seed."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self.prompts = [[task, rng.randrange(VOCABULARY)] for task in range(TASKS)]
        self.words = [[rng.randrange(VOCABULARY) for _ in range(ANSWER_TOKENS)] for _ in range(TASKS)]
        letters = [torch.arange(VOCABULARY)] * ANSWER_TOKENS
        self.answers = torch.cartesian_prod(*letters)  # (8^4, 4), every one
        self.rewards = torch.stack([self.reward(task, self.answers) for task in range(TASKS)])

    def reward(self, task: int, answers: torch.Tensor) -> torch.Tensor:
        """The square of the share of letters in their place: no letter's worth is its own alone."""
        return (answers == torch.tensor(self.words[task])).float().mean(-1) ** 2

    def answer_logprobs(self, model: Any, task: int) -> torch.Tensor:
        """(8^4, 4) of each answer's tokens. Eight answers in a row differ in the last one only, which is
        not read."""
        before_last = self.answers[::VOCABULARY, :-1]
        prompt = torch.tensor(self.prompts[task]).expand(len(before_last), -1)
        logits = model(input_ids=torch.cat([prompt, before_last], 1)).logits[:, len(prompt[0]) - 1 :]
        every = torch.log_softmax(logits, -1).repeat_interleave(VOCABULARY, 0)
        return every.gather(-1, self.answers[..., None])[..., 0]

    def true_gradient(self, model: Any) -> torch.Tensor:
        """Of minus the expected reward per token, as the loss counts it."""
        for task in range(TASKS):
            chance = self.answer_logprobs(model, task).sum(-1).exp()
            (-(chance * self.rewards[task]).sum() / TASKS / ANSWER_TOKENS).backward()
        return take_gradient(model)

    def play(self, model: Any, num_groups: int, generator: torch.Generator) -> list[Any]:
        """Groups of siblings with recorded logprobs; the advantage is RLOO's, which is unbiased."""
        from lightning_rl.records import Transition, logprobs, token_ids

        with torch.no_grad():
            known = [self.answer_logprobs(model, task) for task in range(TASKS)]
        made = []
        for number in range(num_groups):
            task = number % TASKS
            drawn = torch.multinomial(known[task].sum(-1).exp(), SIBLINGS, True, generator=generator)
            values = self.rewards[task][drawn]
            others = (values.sum() - values) / (SIBLINGS - 1)
            made += [
                Transition(
                    f"{number:04d}-{sibling}",
                    0,
                    token_ids(self.prompts[task]),
                    token_ids(self.answers[answer].tolist()),
                    logprobs(known[task][answer].tolist()),
                    1.0,
                    float(values[sibling] - others[sibling]),
                    1.0 / (num_groups * SIBLINGS * ANSWER_TOKENS),
                )
                for sibling, answer in enumerate(drawn.tolist())
            ]
        return made


def take_gradient(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found.clone()


def measure_seed(seed: int) -> list[Measured]:
    """In a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _Seed(seed, Path(folder)).run()


class _Seed:
    def __init__(self, seed: int, folder: Path) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        from lightning_rl.trainer.steps.objective import Objective
        from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, RecordedTrainer

        self.seed, self.world = seed, World()
        settings = BridgeSettings(
            output=folder,
            learning_rate=LEARNING_RATE,
            objective=Objective(),
            max_grad_norm=1e9,
            seed=seed,
            on_gpu=False,
            bfloat16=False,
        )
        words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
        self.trainer = RecordedTrainer(new_model(seed), tokenizer, settings)
        self.generator = torch.Generator().manual_seed(seed)
        self.found: list[Measured] = []

    def run(self) -> list[Measured]:
        self.trainer.steps = self._steps()
        self.trainer.train()
        return self.found

    def _steps(self) -> Iterator[Any]:
        """What the trainer trains, with the measurements between its steps."""
        old = {size: self._played(num) for size, num in GROUPS.items()}
        for done in range(1, max(LAGS) + 1):
            yield self._played(GROUPS["few"])
            if done in LAGS:
                self._measure(done, old)

    def _played(self, num_groups: int) -> Any:
        """Micro-batches of episodes of the weights of now."""
        from lightning_rl.trainer.batches.tree import tree_batches

        return tree_batches(self.world.play(self.trainer.model, num_groups, self.generator), 4096)

    def _measure(self, lag: int, old: dict[str, Any]) -> None:
        truth = self.world.true_gradient(self.trainer.model)
        for size, num_groups in GROUPS.items():
            fresh = self._played(num_groups)
            for way in WAYS:
                estimate, gap = self._estimate(way, fresh if way == "fresh" else old[size])
                distance = float((estimate - truth).norm() / truth.norm())
                cosine = float(torch.nn.functional.cosine_similarity(estimate, truth, dim=0))
                self.found.append(Measured(self.seed, lag, size, way, distance, cosine, gap))

    def _estimate(self, way: str, batches: Any) -> tuple[torch.Tensor, float]:
        if way in ("truncate", "mask"):
            batches = self.trainer.corrected(batches, way, CAP)
        elif way == "ignored":  # the ratio starts at 1 and no weight says how far the policy has moved
            weighed = self.trainer.corrected(batches, "truncate", CAP)
            batches = [
                replace(after, terms=replace(after.terms, multiplier=before.terms.multiplier))
                for before, after in zip(batches, weighed, strict=True)
            ]
        self.trainer.training_step(self.trainer.model, {"micro_batches": batches})
        return take_gradient(self.trainer.model), self.trainer.metrics.gap_mean


def chosen(found: Sequence[Measured], lag: int, size: str, way: str) -> list[Measured]:
    return [one for one in found if (one.lag, one.size, one.way) == (lag, size, way)]


def closer(found: Sequence[Measured], lag: int, size: str, way: str) -> float:
    """In how many of the seeds `way` is closer to the truth than `off`, on the same episodes."""
    pairs = zip(chosen(found, lag, size, way), chosen(found, lag, size, "off"), strict=True)
    return statistics.fmean(a.distance < b.distance for a, b in pairs)


def distance_ratio(found: Sequence[Measured], lag: int, size: str, way: str) -> float:
    pairs = zip(chosen(found, lag, size, way), chosen(found, lag, size, "off"), strict=True)
    return statistics.median(a.distance / b.distance for a, b in pairs)


def table(found: Sequence[Measured], size: str, seeds: int) -> Table:
    episodes = GROUPS[size] * SIBLINGS
    shown = Table(title=f"{episodes} episodes of an older version against the true gradient, {seeds} seeds")
    for column in ("steps older", "gap", "correction", "distance", "cosine", "closer than off", "of off"):
        shown.add_column(column, justify="left" if column == "correction" else "right")
    for lag in LAGS:
        for way in WAYS:
            rows = chosen(found, lag, size, way)
            gap = statistics.median(row.gap for row in rows)
            shown.add_row(
                str(lag),
                f"{gap:.3f}",
                way,
                f"{statistics.median(row.distance for row in rows):.3f}",
                f"{statistics.median(row.cosine for row in rows):.3f}",
                "-" if way == "off" else f"{closer(found, lag, size, way):.0%}",
                f"{distance_ratio(found, lag, size, way):.2f}",
            )
        shown.add_section()
    return shown


def last_line(found: Sequence[Measured], seeds: int) -> dict[str, Any]:
    said: dict[str, Any] = {"seeds": seeds, "steps_older": MAIN_LAG, "episodes": GROUPS[MAIN_SIZE] * SIBLINGS}
    for way in ("truncate", "mask"):
        said[f"closer_{way}"] = closer(found, MAIN_LAG, MAIN_SIZE, way)
        said[f"distance_ratio_{way}"] = distance_ratio(found, MAIN_LAG, MAIN_SIZE, way)
    for way in WAYS:
        rows = chosen(found, MAIN_LAG, MAIN_SIZE, way)
        said[f"median_distance_{way}"] = statistics.median(row.distance for row in rows)
        said[f"median_cosine_{way}"] = statistics.median(row.cosine for row in rows)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in said.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    found: list[Measured] = []
    workers = min(arguments.seeds, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for number, of_seed in enumerate(pool.map(measure_seed, range(arguments.seeds)), 1):
            found += of_seed
            print(f"[{time.strftime('%H:%M:%S')}] {number} of {arguments.seeds} seeds", file=sys.stderr)
    console = Console(width=110)
    for size in GROUPS:
        console.print(table(found, size, arguments.seeds))
    print(json.dumps(last_line(found, arguments.seeds)))


if __name__ == "__main__":
    main()
