"""Weights and tokenizers on disk: what has to be there, what has to fit, and how they are loaded.

Torch and transformers are imported inside the functions that need them, so that a wrong folder is reported at
once. Knows nothing of TRL and nothing of the loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.probes import PROBE_TEXT, tokenizer_probe
from ...errors import ModelMismatchError, UserError
from ...records import Fingerprint, PolicyVersion, Transition, WeightsKind
from ...settings.train import TrainSettings
from ..batches.packing import ModelShape
from ..launch import is_set
from .adapters import with_adapter

if TYPE_CHECKING:
    from .critic import Critic


CPU_TOKENS = 2048  # a micro-batch that a cache still helps; memory is what stock TRL needs for a row or two
GPU_TOKENS = 8192  # enough to keep a GPU busy on models from 0.5B on
_LOOKED_AT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class StartWeights:
    """What a run starts from: the base model (`adapter` None) or a version of the policy."""

    version: int  # 0 is the base model
    model: Path  # folder of full weights
    adapter: Path | None


def check_folder(folder: Path, *, what: str = "model") -> None:
    """UserError with one line unless the folder holds a configuration, weights and a tokenizer."""
    if not folder.is_dir():
        raise UserError(f"no such {what} folder: {folder}; give the one that the engine serves (--model DIR)")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError:
        raise UserError(f"{folder / 'config.json'} is not valid JSON; copy the model again") from None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} has no weights (*.safetensors); is the download complete?")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(
            f"{folder} has no tokenizer (tokenizer.json); copy it from the model that the engine serves"
        )


def fingerprint(folder: Path) -> str:
    """Tells one model from another in a moment: its configuration, and of each weights file the size, the
    header and the first and last megabyte."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            found.update(content.read(_LOOKED_AT))
            content.seek(max(0, size - _LOOKED_AT))
            found.update(content.read())
    return f"sha256:{found.hexdigest()}"


@contextmanager
def one_line_for_full_memory() -> Iterator[None]:
    """UserError with the next step when the GPU is full; torch is loaded by whoever fills it."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise UserError(
            "the GPU has no room for training beside the engine: start that with "
            "`-- --gpu-memory-utilization 0.4`, or train with --dtype bfloat16, --weights lora or a smaller "
            "--micro-batch-tokens"
        ) from error


def start_weights(settings: TrainSettings, live: PolicyVersion | None) -> StartWeights:
    """The live version's weights where there are any, else the base model."""
    if settings.from_base or live is None or live.path is None:
        return StartWeights(0, settings.model, None)
    if live.kind.value != settings.weights:
        raise UserError(
            f"version {live.version} of policy {live.policy!r} is live and holds {live.kind.value} weights, "
            f"but this run trains {settings.weights}: use --weights {live.kind.value}, or --from-base to "
            "start anew"
        )
    path = Path(live.path)
    if not path.is_dir():
        raise UserError(
            f"version {live.version} of policy {live.policy!r} is live, but its folder {path} is gone: "
            "restore it, or use --from-base to start anew"
        )
    if live.kind is WeightsKind.LORA:
        return StartWeights(live.version, settings.model, path)
    check_folder(path, what="version")
    return StartWeights(live.version, path, None)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the tokenizer in {folder} can't be loaded: {_one_line(error)}") from None


def check_tokenizer(tokenizer: Any, fingerprints: Iterable[Fingerprint], folder: Path) -> None:
    """ModelMismatchError unless every engine in the log made the same ids of the same text."""
    ours = tokenizer_probe(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    for fingerprint in fingerprints:
        if fingerprint.tokenizer_probe is not None and fingerprint.tokenizer_probe != ours:
            raise ModelMismatchError(
                f"the tokenizer in {folder} is not the one that the log was recorded with (the engine served "
                f"{fingerprint.base_model}): give --model the folder that the engine serves"
            )


def check_ids(transitions: Iterable[Transition], num_embeddings: int, folder: Path) -> None:
    """ModelMismatchError where the log holds an id that the model has no embedding for."""
    for transition in transitions:
        highest = max(*transition.prompt_ids, *transition.completion_ids)
        if highest >= num_embeddings:
            raise ModelMismatchError(
                f"call {transition.call_id} holds token id {highest}, but the model in {folder} has only "
                f"{num_embeddings}: give --model the folder that the engine serves"
            )


def stored_dtype(folder: Path) -> str:
    """In which precision the folder says that its weights are."""
    config = json.loads((folder / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def shares_prefixes(config: Any) -> bool:
    """Whether a token's hidden state depends on its ancestors alone, all of them, through plain attention."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return (
        kinds == {"full_attention"}
        and not getattr(text, "attn_logit_softcapping", None)
        and not getattr(text, "use_sliding_window", False)
        and not (getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None))
    )


def token_budget(settings: TrainSettings, device_type: str) -> int:
    """Tokens of a micro-batch. Not measured off free memory: every rank, and every run that goes on from
    another one, must lay out the same micro-batches."""
    return settings.micro_batch_tokens or (GPU_TOKENS if device_type == "cuda" else CPU_TOKENS)


def use_device(settings: TrainSettings) -> bool:
    """True: train on a GPU."""
    import torch

    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise UserError(
            "device = cuda, but torch sees no GPU: use --device cpu, or install a CUDA build of torch"
        )
    return available and settings.device != "cpu" and not is_set("ACCELERATE_USE_CPU")


def empty_cache() -> None:
    """What torch has kept of the GPU's memory for later goes back: somebody else needs it now."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_model(settings: TrainSettings, start: StartWeights) -> Any:
    """The model with the weights to train: all of them, or an adapter on frozen ones."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from . import attention

    attention.register()
    transformers_logging.disable_progress_bar()  # the run has one of its own, and pipes want none
    try:
        config = AutoConfig.from_pretrained(str(start.model), local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(start.model),
            local_files_only=True,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=attention.NAME if shares_prefixes(config) else None,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the model in {start.model} can't be loaded: {_one_line(error)}") from None
    return model if settings.weights == "full" else with_adapter(model, settings, start.adapter)


def load_reference(settings: TrainSettings) -> Any:
    """The frozen base model, for full runs; None for LoRA runs, whose own base it is."""
    if settings.weights == "lora":
        return None
    model = load_model(settings, StartWeights(0, settings.model, None)).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def load_critic(settings: TrainSettings, start: StartWeights, policy: Any, shape: ModelShape) -> Critic:
    """A critic beside the policy: with weights of its own for full runs, on a second adapter for LoRA.

    It goes on from the one that the start version was trained with, where that left one.
    """
    from transformers import AutoModel

    from . import attention
    from .critic import AdapterBody, Body, Critic, CriticSettings, OwnBody

    body: Body
    if settings.weights == "lora":
        body = AdapterBody(policy, policy.peft_config["default"])
    else:
        name = attention.NAME if shape.shares_prefixes else None
        backbone = AutoModel.from_pretrained(
            str(start.model), local_files_only=True, dtype=policy.dtype, attn_implementation=name
        )
        body = OwnBody(backbone.to(policy.device))
    chosen = CriticSettings(
        learning_rate=settings.critic_learning_rate,
        epochs=settings.critic_epochs,
        clip=settings.critic_clip,
        max_grad_norm=settings.max_grad_norm,
        micro_batch_tokens=token_budget(settings, policy.device.type),
        loss=settings.critic_loss,
    )
    critic = Critic(body, chosen, shape, policy.device)
    version_folder = start.adapter or start.model
    before = version_folder.parent.parent  # the run that made the version
    if start.version > 0 and Critic.is_in(before):
        critic.load(before)
    return critic


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
