"""One way of computing one case, in a process of its own, so that its peak memory is its own.

    python ways.py WAY CASE [--gradient FILE] [--rows N]
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from recorded import Case, append_only, forked, long_shared_prompt
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_rl.records import Transition
from lightning_rl.trainer.batches.packing import MicroBatch, cheapest_batches
from lightning_rl.trainer.batches.rows import merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import tree_batches
from lightning_rl.trainer.steps import attention
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.shape import shape_of
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings, GRPOTrainer, RecordedTrainer

VOCABULARY = 8192
MICRO_BATCH_TOKENS = 4096
STOCK_ROWS = (1, 2, 4, 8)  # micro-batches among which stock TRL may choose its best

CASES: dict[str, Callable[[], Case]] = {
    "2 calls": lambda: append_only(2, vocabulary=VOCABULARY),
    "8 calls": lambda: append_only(8, vocabulary=VOCABULARY),
    "16 calls": lambda: append_only(16, vocabulary=VOCABULARY),
    "long shared prompt": lambda: long_shared_prompt(vocabulary=VOCABULARY),
    "forked": lambda: forked(vocabulary=VOCABULARY),
}
PACKED: dict[str, Callable[[Sequence[Transition], Any], Sequence[MicroBatch]]] = {
    "padded": lambda rows, _: rows_batches(rows, MICRO_BATCH_TOKENS),
    "merged": lambda rows, _: merged_batches(rows, MICRO_BATCH_TOKENS),
    "tree": lambda rows, _: tree_batches(rows, MICRO_BATCH_TOKENS),
    "chosen": lambda rows, shape: cheapest_batches(rows, MICRO_BATCH_TOKENS, shape),
}
WAYS = ("stock", *PACKED)


def new_model(name: str) -> Any:
    attention.register()
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
            attn_implementation=name,
        )
    ).float()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(3)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        unk_token="w0",
        eos_token="w2",
        pad_token="w2",
    )


def bridge_settings() -> BridgeSettings:
    return BridgeSettings(
        output=Path(tempfile.mkdtemp(prefix="bench-trainer-")),
        learning_rate=1e-5,
        objective=Objective(),
        max_grad_norm=1.0,
        seed=0,
        on_gpu=False,
        bfloat16=False,
    )


class Stock:
    """TRL's own forward, loss and head over padded rows."""

    def __init__(self) -> None:
        ours = RecordedTrainer(new_model("sdpa"), tokenizer(), bridge_settings())  # for its settings alone
        self.trainer = GRPOTrainer(
            model=new_model("sdpa"),
            args=ours.args,
            reward_funcs=lambda **_: [],
            train_dataset=ours.train_dataset,
            processing_class=tokenizer(),
        )
        self.model = self.trainer.model
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1

    def best_rows(self, rows: Sequence[Transition]) -> int:
        sample = random.Random(1).sample(list(rows), min(len(rows), 16))
        seconds = {}
        for size in STOCK_ROWS:
            began = time.perf_counter()
            self.step(sample, size)
            seconds[size] = time.perf_counter() - began
            self.model.zero_grad()
        return min(seconds, key=lambda size: seconds[size])

    def step(self, rows: Sequence[Transition], size: int) -> None:
        self.model.train()
        ordered = random.Random(0).sample(list(rows), len(rows))  # TRL shuffles its generation batch
        for start in range(0, len(ordered), size):
            loss = self.trainer.compute_loss(self.model, _padded(ordered[start : start + size]))
            self.trainer.accelerator.backward(loss)


def _padded(rows: Sequence[Transition]) -> dict[str, torch.Tensor]:
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
    return found | {"num_items_in_batch": torch.ones(())}


class Ours:
    def __init__(self, way: str) -> None:
        self._way = way
        self.trainer = RecordedTrainer(new_model(attention.NAME), tokenizer(), bridge_settings())
        self.model = self.trainer.model
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1

    def step(self, rows: Sequence[Transition]) -> Sequence[MicroBatch]:
        batches = PACKED[self._way](rows, shape_of(self.model))
        self.trainer.training_step(self.model, {"micro_batches": batches})
        return batches


def measure(way: str, case: Case, gradient: Path | None, stock_rows: int) -> dict[str, Any]:
    rows = case.transitions
    found: dict[str, Any] = {"way": way, "case": case.name, "call_tokens": case.call_tokens}
    runner = Stock() if way == "stock" else Ours(way)
    if isinstance(runner, Stock):
        runner.step(rows[:stock_rows], stock_rows)
        found["micro_batch_rows"] = stock_rows
    else:
        runner.step(rows[:4])
    runner.model.zero_grad()  # the first calls are slower, and not measured
    before_mb = _peak_mb()
    began = time.perf_counter()
    if isinstance(runner, Stock):
        runner.step(rows, stock_rows)
    else:
        batches = runner.step(rows)
        found["micro_batches"] = len(batches)
        found["layout"] = type(batches[0]).__name__
    if gradient is not None:
        torch.save(torch.cat(list(_gradients(runner.model))), gradient)
    torch.nn.utils.clip_grad_norm_(runner.model.parameters(), 1.0)
    runner.trainer.optimizer.step()
    seconds = time.perf_counter() - began
    return found | {
        "seconds": seconds,
        "call_tokens_per_sec": case.call_tokens / seconds,
        "peak_mb": _peak_mb(),
        "before_mb": before_mb,
    }


def _gradients(model: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad.detach().reshape(-1)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--gradient", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="micro-batch of stock")
    parser.add_argument("--search", action="store_true", help="print the best micro-batch of stock")
    arguments = parser.parse_args()
    case = CASES[arguments.case]()
    if arguments.search:
        print(json.dumps({"rows": Stock().best_rows(case.transitions)}))
    else:
        print(json.dumps(measure(arguments.way, case, arguments.gradient, arguments.rows)))


if __name__ == "__main__":
    main()
