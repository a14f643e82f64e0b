"""The trainer's side of the bench: versions that differ noticeably, and what transformers thinks of tokens.

Owns the making of weights (a tiny model, adapters through peft, whole models) and their scoring from the
folders that the engine was given. Knows neither proxy nor engine.
"""

from __future__ import annotations

import copy
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_rl.engine.checksum import checksum_of
from lightning_rl.engine.probes import CANARY_TEXTS
from lightning_rl.records import TokenIds, WeightsKind, token_ids

BASE = "base"
RANK = 8
FIRST_SCALE = 0.02
NOTICEABLE = 0.3  # nats, root mean square over the probe's tokens
PROBE_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Weights:
    """What the engine is to load, and the name under which the trainer's side scores it."""

    name: str
    kind: WeightsKind
    path: Path
    checksum: str


class Trainer(Protocol):
    """What the parts need of a trainer; tests have a small one."""

    @property
    def sequences(self) -> list[TokenIds]: ...

    def adapter(self, name: str) -> Weights: ...
    def full(self, name: str) -> Weights: ...
    def score(self, name: str, ids: TokenIds, num_last: int | None = None) -> list[float]:
        """Logprobs of ids[1:], or of so many of the last ids."""


def copied(weights: Weights, name: str) -> Weights:
    """The same tensors in a folder of their own."""
    path = weights.path.with_name(name)
    shutil.copytree(weights.path, path)
    return Weights(name, weights.kind, path, weights.checksum)


def rms(one: list[float], other: list[float]) -> float:
    return float((sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)) ** 0.5)


def tiny_llama(folder: Path, tokenizer_folder: Path, *, seed: int = 0, hidden: int = 128) -> Path:
    """A Llama of random weights with another model's tokenizer: vLLM serves it like any other."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        initializer_range=0.1,  # so that a token's context matters to its logprob
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    partial = folder.with_name(f".{folder.name}")
    LlamaForCausalLM(config).float().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


class TorchTrainer:
    """Versions of one model; each call runs to its end before the next (torch is asked from threads)."""

    def __init__(self, model: Path, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        self.model = model
        self._folder = folder
        self._torch = torch
        self._lock = threading.Lock()
        self._load: Any = AutoModelForCausalLM.from_pretrained
        self._models: dict[str, Any] = {BASE: self._read(model)}
        self._adapters: Any = None  # one model with every adapter that was scored
        self._paths: dict[str, Weights] = {}
        self._num_made = 0
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = [i for text in CANARY_TEXTS for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        starts = range(0, min(4 * PROBE_TOKENS, len(ids) - PROBE_TOKENS + 1), PROBE_TOKENS)
        self.sequences = [token_ids(ids[start : start + PROBE_TOKENS]) for start in starts]

    def _read(self, folder: Path) -> Any:
        return self._load(folder, dtype=self._torch.float32).eval()

    def adapter(self, name: str) -> Weights:
        """Random, and so large that it moves the probe's logprobs by NOTICEABLE."""
        from peft import LoraConfig, get_peft_model

        with self._lock:
            generator = self._generator()
            config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
            model = get_peft_model(copy.deepcopy(self._models[BASE]), config)
            randomness = [
                (weight, self._torch.randn(weight.shape, generator=generator))
                for key, weight in model.named_parameters()
                if "lora_" in key
            ]
            with self._torch.no_grad():
                for key, weight in model.named_parameters():
                    if "lora_A" in key:
                        weight.copy_(
                            self._torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
                        )
            before = [self._logprobs(self._models[BASE], ids) for ids in self.sequences]
            scale, moved = FIRST_SCALE, 0.0
            while moved < NOTICEABLE:
                scale *= 1.5
                with self._torch.no_grad():
                    for weight, noise in randomness:
                        if weight.shape[1] == RANK:
                            weight.copy_(scale * noise)
                after = [self._logprobs(model, ids) for ids in self.sequences]
                moved = rms([v for row in before for v in row], [v for row in after for v in row])
            return self._save(model, name, WeightsKind.LORA)

    def full(self, name: str) -> Weights:
        """The base with noise of a twentieth of each matrix's own spread."""
        with self._lock:
            generator = self._generator()
            model = copy.deepcopy(self._models[BASE])
            with self._torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim == 2:
                        noise = self._torch.randn(weight.shape, generator=generator)
                        weight.add_(noise * weight.std() * 0.05)
            return self._save(model, name, WeightsKind.FULL)

    def _generator(self) -> Any:
        self._num_made += 1
        return self._torch.Generator().manual_seed(self._num_made)

    def _save(self, model: Any, name: str, kind: WeightsKind) -> Weights:
        from lightning_rl.trainer.version_folders import save_version

        saved = save_version(model, self._folder / name, base_model=self.model, kind=kind)
        made = Weights(name, kind, saved.path, saved.checksum)
        self._paths[name] = made
        return made

    def know(self, weights: Weights) -> None:
        """Weights that were made elsewhere, to be scored by their name."""
        self._paths[weights.name] = weights

    def score(self, name: str, ids: TokenIds, num_last: int | None = None) -> list[float]:
        with self._lock:
            return self._logprobs(self._scored_by(name), ids, num_last)

    def _scored_by(self, name: str) -> Any:
        if name in self._models:
            return self._models[name]
        weights = self._paths[name]
        assert checksum_of(weights.path) == weights.checksum, f"{weights.path} was changed"
        if weights.kind is WeightsKind.FULL:
            return self._models.setdefault(name, self._read(weights.path))
        from peft import PeftModel

        if self._adapters is None:
            base = copy.deepcopy(self._models[BASE])
            self._adapters = PeftModel.from_pretrained(base, weights.path, adapter_name=name).eval()
        elif name not in self._adapters.peft_config:
            self._adapters.load_adapter(weights.path, adapter_name=name)
        self._adapters.set_adapter(name)
        return self._adapters

    def _logprobs(self, model: Any, ids: TokenIds, num_last: int | None = None) -> list[float]:
        row = self._torch.tensor([list(ids)])
        number = len(ids) - 1 if num_last is None else num_last
        with self._torch.no_grad():  # the vocabulary is most of a tiny model: only where it is asked for
            logits = model(row, logits_to_keep=number + 1).logits[0, :-1]
        found: list[float] = logits.log_softmax(-1).gather(1, row[0, -number:, None])[:, 0].tolist()
        return found
