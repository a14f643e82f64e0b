"""The adapter that a LoRA run trains: a new one of the shape that the settings name, or a served one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import SettingsError, UserError
from ...settings.train import TrainSettings

ALL_LINEAR = "all-linear"
"""peft's name for every linear layer but the head."""


def with_adapter(model: Any, settings: TrainSettings, served: Path | None) -> Any:
    """`model` frozen under an adapter; `served`: one to go on from, with the shape that it has."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors import SafetensorError

    if served is not None:
        try:
            return PeftModel.from_pretrained(model, str(served), is_trainable=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"the adapter in {served} can't be loaded: {_one_line(error)}") from None
    torch.manual_seed(settings.seed)
    adapter = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=_alpha(settings),
        lora_dropout=0.0,
        bias="none",
        target_modules=settings.lora_targets or ALL_LINEAR,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, adapter)
    except ValueError as error:
        raise UserError(f"lora_targets = {settings.lora_targets}: {_one_line(error)}") from None


def require_its_shape(settings: TrainSettings, served: Path) -> None:
    """SettingsError where a shape was asked for that the adapter to go on from does not have."""
    try:
        has = json.loads((served / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the adapter in {served} can't be loaded: {_one_line(error)}") from None
    wanted = {
        "lora_rank": (settings.lora_rank, has.get("r")),
        "lora_alpha": (_alpha(settings), has.get("lora_alpha")),
        "lora_targets": (sorted(settings.lora_targets), sorted(has.get("target_modules") or ())),
    }
    for name, (asked, is_so) in wanted.items():
        if name in settings.model_fields_set and asked != is_so:
            raise SettingsError(
                f"the live version's adapter has {name} = {is_so}, not {asked}: leave {name} out, or start "
                "over with --from-base"
            )


def _alpha(settings: TrainSettings) -> float:
    return 2 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
