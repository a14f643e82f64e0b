"""The model that is trained in the bench, on a CPU and on a GPU: random weights of a real architecture.

On a CPU something that two cores can train, in float32. On a GPU the sizes of Qwen2.5-0.5B, float32 weights
under 16-bit autocast with gradient checkpointing, as TRL does by default; gradients are compared in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightning_rl.trainer.steps import attention
from lightning_rl.trainer.steps.models import CPU_TOKENS, GPU_TOKENS
from lightning_rl.trainer.steps.objective import Objective
from lightning_rl.trainer.steps.trl_bridge import BridgeSettings

_IDS: dict[str, int] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@dataclass(frozen=True, slots=True)
class Subject:
    what: str
    vocabulary: int
    micro_batch_tokens: int  # what `lightning train` takes there by default
    stock_rows: tuple[int, ...]  # micro-batches among which stock TRL may choose its best
    new: Callable[[str], Any]  # attention implementation -> model


def _small(implementation: str) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            attn_implementation=implementation,
            **_IDS,
        )
    )


def _half_a_billion(implementation: str) -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            attn_implementation=implementation,
            **_IDS,
        )
    )


SUBJECTS = {
    "cpu": Subject("6 layers of 256, float32", 8192, CPU_TOKENS, (1, 2, 4, 8, 16), _small),
    "cuda": Subject(
        "the sizes of Qwen2.5-0.5B, 16-bit autocast",
        151936,
        GPU_TOKENS,
        (1, 2, 4, 8, 16, 32, 64),
        _half_a_billion,
    ),
}


def new_model(device: str, implementation: str) -> Any:
    attention.register()
    torch.manual_seed(0)
    return SUBJECTS[device].new(implementation).float()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(3)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        unk_token="w0",
        eos_token="w2",
        pad_token="w2",
    )


def bridge_settings(device: str, *, float32: bool) -> BridgeSettings:
    return BridgeSettings(
        output=Path(tempfile.mkdtemp(prefix="bench-trainer-")),
        learning_rate=1e-5,
        objective=Objective(),
        max_grad_norm=1.0,
        seed=0,
        on_gpu=device == "cuda",
        bfloat16=device == "cuda" and not float32,
        gradient_checkpointing=device == "cuda",
    )
