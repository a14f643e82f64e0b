"""A tree's attention through FlexAttention: one kernel that skips the blocks in which nothing sees anything.

For GPUs. On a CPU torch computes it densely and without gradients, which does for a comparison and nothing
else. Lengths are whole blocks, so that few shapes are compiled. Knows nothing of losses or of transformers.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..batches.blocks import BLOCK, TreeBlocks, tree_blocks
from ..batches.tree import Ints


@dataclass(frozen=True, slots=True)
class FlexTree:
    """`batches.TreeBlocks` on the device."""

    mask: BlockMask

    @classmethod
    def of(cls, exit: Ints, device: torch.device) -> FlexTree:
        return cls(block_mask(tree_blocks(exit), device))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """query (1, heads, N, D), key and value (1, key heads, N, D) -> (1, N, heads, D)."""
        # Under autocast a model with normalised queries hands them over in float32 beside 16-bit values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        sharing = query.shape[1] // key.shape[1]
        if sharing & (sharing - 1):  # transformers repeats them, too, where the number is no power of two
            key, value = key.repeat_interleave(sharing, dim=1), value.repeat_interleave(sharing, dim=1)
        attend = _compiled() if query.is_cuda else _uncompiled
        found = attend(
            query,
            key,
            value,
            block_mask=self.mask,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return found.transpose(1, 2).contiguous()


def block_mask(blocks: TreeBlocks, device: torch.device) -> BlockMask:
    exits = torch.from_numpy(blocks.exit).to(device)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < exits[key])

    num_partial, partial = _listed(blocks.partial, device)
    num_full, full = _listed(blocks.full, device)
    length = len(blocks.exit)
    return BlockMask.from_kv_blocks(
        num_partial, partial, num_full, full, BLOCK, sees, seq_lengths=(length, length)
    )


def _listed(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, 1, n) how many blocks of keys each block of queries reads, (1, 1, n, n) which: these first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=1).astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Compiled for the first length as it is, for the second for any length, and never again."""
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def _uncompiled(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Heads:
    num: int
    num_key: int
    width: int


def why_not(device: torch.device, dtype: torch.dtype, heads: Heads) -> str | None:
    """The reason why FlexAttention can't be used for such a model here; None: it was tried, and it is right.

    Kernels are compiled at first use and have limits that change from version to version (heads that are too
    narrow, no compiler, an old GPU). A small tree, forward and backward, says it better than any list; two
    lengths of it, since torch compiles for one length first and then for any.
    """
    if device.type != "cuda":
        return f"torch gives it no gradients on a {device.type}"
    for num_blocks in (3, 5):
        try:
            apart = _apart_from_dense(device, dtype, heads, num_blocks)
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            return " ".join(str(error).split())[:120] or type(error).__name__
        if not apart < _APART:  # also where it is no number
            return f"its gradients are off by {apart:.0%}"
    return None


_APART = 0.05  # 16-bit rounding of a few hundred terms is well below


def _apart_from_dense(device: torch.device, dtype: torch.dtype, heads: Heads, num_blocks: int) -> float:
    """Relative difference of gradients from a dense mask's, on a chain of one block that forks in two."""
    length = num_blocks * BLOCK
    exits = np.full(length, length)
    exits[BLOCK : BLOCK + 100] = BLOCK + 100
    index = np.arange(length)
    seen = torch.from_numpy((index <= index[:, None]) & (index[:, None] < exits)).to(device)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(num: int) -> torch.Tensor:
        found = torch.randn((1, num, length, heads.width), generator=generator, device=device, dtype=dtype)
        return found.requires_grad_()

    query, key, value = inputs = (drawn(heads.num), drawn(heads.num_key), drawn(heads.num_key))
    weights = drawn(heads.num).detach().transpose(1, 2)
    flex = FlexTree.of(exits, device).attend(query, key, value, None)
    found = torch.autograd.grad((flex * weights).sum(), inputs)
    sharing = heads.num // heads.num_key
    dense = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(sharing, dim=1), value.repeat_interleave(sharing, dim=1), attn_mask=seen
    )
    expected = torch.autograd.grad((dense.transpose(1, 2) * weights).sum(), inputs)
    apart = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(apart).max())
