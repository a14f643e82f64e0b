"""Random models and a tokenizer of a few dozen words, made in a moment, for tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightning_rl.trainer.steps import attention

VOCABULARY = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "attn_implementation": attention.NAME,
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def qwen3(*, seed: int = 0) -> Any:
    attention.register()
    torch.manual_seed(seed)
    return _sharpen(Qwen3ForCausalLM(Qwen3Config(head_dim=8, tie_word_embeddings=True, **_SHAPE)))


def llama(*, seed: int = 0) -> Any:
    attention.register()
    torch.manual_seed(seed)
    return _sharpen(LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **_SHAPE)))


def _sharpen(model: Any) -> Any:
    """Larger weights than at initialisation, so that a token's context matters to its logprob."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.float()


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(str(folder))
    tokenizer().save_pretrained(str(folder))
    return folder
