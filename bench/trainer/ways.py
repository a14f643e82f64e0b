"""One way of computing one case, in a process of its own, so that its peak memory is its own.

    python ways.py WAY CASE [--device cpu|cuda] [--gradient FILE] [--rows N]
    python ways.py stock CASE --search

prints one JSON object. The optimizer step is the same for all: AdamW over all weights, after the summed
gradients of every micro-batch. `stock` is TRL's GRPOTrainer as it stands (padded rows in random order, its
own fused head, its own loss); `chosen` is what `lightning train` would do by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recorded import Case, append_only, forked, long_shared_prompt, smallest
from subject import SUBJECTS, bridge_settings, new_model, tokenizer
from trl.trainer.utils import compute_flops_per_token, compute_mfu, get_peak_flops

from lightning_rl.records import Transition
from lightning_rl.trainer.batches.packing import MicroBatch, ModelShape, cheapest_batches
from lightning_rl.trainer.batches.rows import RowsBatch, merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import num_context, tree_batches
from lightning_rl.trainer.steps import attention
from lightning_rl.trainer.steps.trl_bridge import GRPOTrainer, RecordedTrainer

CASES: dict[str, Callable[[int], Case]] = {
    "2 calls": lambda vocabulary: append_only(2, vocabulary=vocabulary),
    "8 calls": lambda vocabulary: append_only(8, vocabulary=vocabulary),
    "16 calls": lambda vocabulary: append_only(16, vocabulary=vocabulary),
    "long shared prompt": lambda vocabulary: long_shared_prompt(vocabulary=vocabulary),
    "forked": lambda vocabulary: forked(vocabulary=vocabulary),
    "smallest": lambda vocabulary: smallest(vocabulary=vocabulary),
}
WAYS = ("stock", "padded", "merged", "tree", "chosen")
SEARCHED_ROWS = 32  # a sample of the case, on which stock TRL looks for its best micro-batch


class Stock:
    """TRL's own forward, loss and head over padded rows."""

    def __init__(self, device: str, rows: int, *, float32: bool = False) -> None:
        settings = bridge_settings(device, float32=float32)
        ours = RecordedTrainer(new_model(device, "sdpa"), tokenizer(), settings)  # for its settings alone
        self.trainer = GRPOTrainer(
            model=new_model(device, "sdpa"),
            args=ours.args,
            reward_funcs=lambda **_: [],
            train_dataset=ours.train_dataset,
            processing_class=tokenizer(),
        )
        del ours
        self._device, self._rows = device, rows
        self.model = self.trainer.model
        _prepare(self.trainer)

    def best_rows(self, rows: Sequence[Transition]) -> int:
        sample = random.Random(1).sample(list(rows), min(len(rows), SEARCHED_ROWS))
        seconds: dict[int, float] = {}
        sizes = SUBJECTS[self._device].stock_rows
        for size in (sizes[0], *sizes):  # the first calls are slower, and not measured
            self._rows = size
            try:
                began = _now(self._device)
                self.step(sample)
                seconds[size] = _now(self._device) - began
            except torch.OutOfMemoryError:
                break
            self.model.zero_grad()
        return min(seconds, key=lambda size: seconds[size])

    def step(self, rows: Sequence[Transition]) -> str:
        self.model.train()
        ordered = random.Random(0).sample(list(rows), len(rows))  # TRL shuffles its generation batch
        for start in range(0, len(ordered), self._rows):
            inputs = _padded(ordered[start : start + self._rows], self._device)
            with self.trainer.accelerator.autocast():
                loss = self.trainer.compute_loss(self.model, inputs)
            self.trainer.accelerator.backward(loss)
        return f"{self._rows} rows"


def _padded(rows: Sequence[Transition], device: str) -> dict[str, torch.Tensor]:
    """The dictionary that TRL's loss reads: prompts padded left, completions right."""
    prompt = max(len(row.prompt_ids) for row in rows)
    completion = max(len(row.completion_ids) for row in rows)
    found = {
        "prompt_ids": torch.full((len(rows), prompt), 2),
        "prompt_mask": torch.zeros((len(rows), prompt), dtype=torch.long),
        "completion_ids": torch.full((len(rows), completion), 2),
        "completion_mask": torch.zeros((len(rows), completion), dtype=torch.long),
        "advantages": torch.zeros((len(rows), completion)),
        "old_per_token_logps": torch.zeros((len(rows), completion)),
    }
    for i, row in enumerate(rows):
        length = len(row.completion_ids)
        found["prompt_ids"][i, prompt - len(row.prompt_ids) :] = torch.tensor(list(row.prompt_ids))
        found["prompt_mask"][i, prompt - len(row.prompt_ids) :] = 1
        found["completion_ids"][i, :length] = torch.tensor(list(row.completion_ids))
        found["completion_mask"][i, :length] = 1
        found["advantages"][i, :length] = row.advantage * row.multiplier
        found["old_per_token_logps"][i, :length] = torch.tensor(list(row.behavior_logprobs))
    return {
        name: values.to(device) for name, values in (found | {"num_items_in_batch": torch.ones(())}).items()
    }


class Ours:
    def __init__(self, device: str, way: str, *, float32: bool = False) -> None:
        self._way, self._tokens = way, SUBJECTS[device].micro_batch_tokens
        settings = bridge_settings(device, float32=float32)
        self.trainer = RecordedTrainer(new_model(device, attention.NAME), tokenizer(), settings)
        self.model = self.trainer.model
        _prepare(self.trainer)

    def step(self, rows: Sequence[Transition]) -> str:
        batches = packed(self._way, rows, self._tokens, self.trainer.shape)
        self.trainer.training_step(self.model, {"micro_batches": batches})
        first = batches[0]
        layout = "rows" if isinstance(first, RowsBatch) else f"tree, {first.attention}"
        return f"{layout} x{len(batches)}"


def packed(way: str, rows: Sequence[Transition], tokens: int, shape: ModelShape) -> Sequence[MicroBatch]:
    if way == "padded":
        return rows_batches(rows, tokens)
    if way == "merged":
        return merged_batches(rows, tokens)
    layout = "tree" if way == "tree" else shape.layout
    return cheapest_batches(rows, tokens, replace(shape, layout=layout))


def _prepare(trainer: Any) -> None:
    """What `train()` does before its first step."""
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    trainer.current_gradient_accumulation_steps = 1


def measure(way: str, case: Case, device: str, stock_rows: int, gradient: Path | None) -> dict[str, Any]:
    runner = _runner(way, device, stock_rows)
    on_gpu = device == "cuda"
    runner.step(case.transitions if on_gpu else case.transitions[:4])  # kernels are compiled, caches filled
    runner.model.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = _now(device)
    layout = runner.step(case.transitions)
    if gradient is not None and not on_gpu:
        torch.save(_gradient(runner.model), gradient)
    torch.nn.utils.clip_grad_norm_(runner.model.parameters(), 1.0)
    runner.trainer.optimizer.step()
    seconds = _now(device) - began
    found = {
        "way": way,
        "case": case.name,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "call_tokens": case.call_tokens,
        "unique_tokens": unique_tokens(case),
        "layout": layout,
        "seconds": seconds,
        "call_tokens_per_sec": case.call_tokens / seconds,
        "peak_mb": _peak_mb(device),
        "mfu": mfu(runner.model.config, case, seconds) if on_gpu else None,
    }
    if gradient is not None and on_gpu:  # 16 bits are too coarse to compare
        del runner
        torch.cuda.empty_cache()
        exact = _runner(way, device, stock_rows, float32=True)
        exact.step(case.transitions)
        torch.save(_gradient(exact.model), gradient)
    return found


def _runner(way: str, device: str, stock_rows: int, *, float32: bool = False) -> Stock | Ours:
    if way == "stock":
        return Stock(device, stock_rows, float32=float32)
    return Ours(device, way, float32=float32)


def unique_tokens(case: Case) -> int:
    """What any way has to compute at least: every distinct prefix once."""
    (tree,) = tree_batches(case.transitions, sys.maxsize)
    return len(tree.input_ids)


def mfu(config: Any, case: Case, seconds: float) -> float | None:
    """Percent, by TRL's formula on the unique tokens, at the calls' mean length; None for an unknown GPU."""
    lengths = [num_context(transition) for transition in case.transitions]
    flops = compute_flops_per_token(config, sum(lengths) // len(lengths))
    peak = get_peak_flops(torch.cuda.get_device_name(), "bfloat16")
    return None if peak is None else compute_mfu(flops, unique_tokens(case) / seconds, 1, peak)


def _gradient(model: Any) -> torch.Tensor:
    return torch.cat(list(_gradients(model)))


def _gradients(model: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad.detach().float().cpu().reshape(-1)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mb(device: str) -> float:
    """On a GPU what torch has allocated, on a CPU what the process has held."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--device", choices=list(SUBJECTS), default="cpu")
    parser.add_argument("--gradient", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="micro-batch of stock")
    parser.add_argument("--search", action="store_true", help="print the best micro-batch of stock")
    asked = parser.parse_args(arguments)
    case = CASES[asked.case](SUBJECTS[asked.device].vocabulary)
    if asked.search:
        return {"rows": Stock(asked.device, 1).best_rows(case.transitions)}
    return measure(asked.way, case, asked.device, asked.rows, asked.gradient)


if __name__ == "__main__":
    print(json.dumps(main()))
