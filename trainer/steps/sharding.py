"""Weights that are sharded over ranks (FSDP2): made on a CPU too, and made whole again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..launch import is_set


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Accelerate shards only for kinds of devices that are not CPUs (AcceleratorState), though torch can.
    While an Accelerator is made, this lets it believe in a GPU; the device stays what it is."""
    from accelerate import DistributedType, PartialState

    kind = PartialState._shared_state.get("distributed_type")
    if kind is not DistributedType.MULTI_CPU or not is_set("ACCELERATE_USE_FSDP"):
        yield
        return
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    yield


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def whole(value: Any, keep: bool) -> Any:
    """A sharded tensor made whole, which every rank must ask for; None where it is not to be kept. Anything
    else as it is."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    return full.cpu() if keep else None


def like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`value`, whole in every rank, laid out as `other` is."""
    if not isinstance(other, DTensor):
        return value
    on_device = value.to(other.device)
    return distribute_tensor(on_device, other.device_mesh, other.placements)


def whole_state(model: Any, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """The trained weights of a sharded model, on the CPU of rank 0; the other ranks get none of it. Every
    rank must ask. `dtypes`: before sharding, which trains in float32 what it computes in bfloat16."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    once = {name for name, _ in model.named_parameters()}
    twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once  # tied weights
    return {name: value.to(dtypes[name]) for name, value in state.items() if name not in twice}
