"""A trainer's state to the last bit, in one file: the trained weights, the optimizer, the schedule, the count
of its steps and the states of every source of random numbers.

Weights are kept at the precision in which they are trained. What is not trained is in the model's own folder.
Where weights are sharded, so is the optimizer's state; the file holds them whole, as one process would have
them, and every rank takes part in saving and in loading.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import UserError
from .sharding import like, whole

_FILE = "state.pt"


class Trainable(Protocol):
    """What is read of transformers' Trainer, once its optimizer was made."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any  # transformers' TrainerState, of which `global_step` counts optimizer steps


def save_state(trainer: Trainable, folder: Path | None) -> None:
    """`folder` None: take part, and write nothing."""
    keep = folder is not None
    state = {
        "weights": {name: whole(weight.detach(), keep) for name, weight in _trained(trainer).items()},
        "optimizer": _whole_optimizer(trainer.optimizer.state_dict(), keep),
        "schedule": trainer.lr_scheduler.state_dict(),
        "optimizer_steps": trainer.state.global_step,
        "random": _random_states(),
    }
    if folder is not None:
        torch.save(state, folder / _FILE)


def load_state(trainer: Trainable, folder: Path) -> None:
    """What `save_state` wrote, into a trainer of the same shape. UserError where it is of another."""
    file = folder / _FILE
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        own = _trained(trainer)
        if own.keys() != state["weights"].keys():
            raise ValueError("it holds other weights than this run trains")
        with torch.no_grad():
            for name, weight in own.items():
                found = state["weights"][name]
                if (found.shape, found.dtype) != (weight.shape, weight.dtype):
                    raise ValueError(f"{name} is {tuple(found.shape)} in {found.dtype}")
                weight.copy_(like(found, weight))
        trainer.optimizer.load_state_dict(_optimizer_like(state["optimizer"], trainer.optimizer))
        trainer.lr_scheduler.load_state_dict(state["schedule"])
        trainer.state.global_step = state["optimizer_steps"]
        _set_random_states(state["random"])
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} can't be loaded: {reason}; start a new run (--fresh)") from None


def _trained(trainer: Trainable) -> dict[str, Any]:
    """By name; a LoRA run's critic has an adapter on the same model, and an optimizer of its own."""
    ours = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    return {name: weight for name, weight in trainer.model.named_parameters() if id(weight) in ours}


def _whole_optimizer(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    found = {
        number: {name: whole(value, keep) for name, value in of_one.items()}
        for number, of_one in state["state"].items()
    }
    return {**state, "state": found}


def _optimizer_like(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Its tensors are laid out as the weights that they are of; counts are no one's in particular."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = {
        number: {
            name: like(value, weights[number])
            if torch.is_tensor(value) and value.shape == weights[number].shape
            else value
            for name, value in of_one.items()
        }
        for number, of_one in state["state"].items()
    }
    return {**state, "state": found}


def _random_states() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert kind == "MT19937", "numpy's global generator has one kind"
    version, internal, next_gauss = random.getstate()
    return {
        "python": [version, list(internal), next_gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
