"""Attention over a prefix tree, as an attention implementation of transformers.

Registered under the name `NAME`; a model loaded with it behaves as with `sdpa` unless its forward is given
`tree_attention=`, as `model_inputs` does: chunked (here, for CPUs and short trees), or FlexAttention
(flex.py). Rotary position ids (the depth in the tree) are applied by the model before it comes here. Knows
nothing of losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..batches.blocks import padded
from ..batches.chunks import AttentionChunks, attention_chunks
from ..batches.packing import MicroBatch
from ..batches.tree import TreeBatch
from .flex import FlexTree

NAME = "lightning_tree"


class TreeAttention(Protocol):
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """query (1, heads, N, D), key and value (1, key heads, N, D) -> (1, N, heads, D)."""
        ...


def model_inputs(batch: MicroBatch, device: Any) -> dict[str, Any]:
    """What a model's forward is called with to get the batch's hidden states, in the order of its tokens."""

    def on_device(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    if not isinstance(batch, TreeBatch):
        return {
            "input_ids": on_device(batch.input_ids),
            "attention_mask": on_device(batch.attention_mask),
        }
    ids, depth = batch.input_ids, batch.depth
    found: TreeAttention
    if batch.attention == "flex":
        ids, depth = padded(ids), padded(depth)  # no loss term is at a padding token
        found = FlexTree.of(batch.exit, device)
    else:
        found = ChunkedTree(attention_chunks(depth, batch.exit), device)
    return {
        "input_ids": on_device(ids)[None],
        "position_ids": on_device(depth)[None],
        # Four dimensions: transformers takes it for a mask that is ready, and makes none of N x N.
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device),
        "tree_attention": found,
    }


@dataclass(frozen=True, slots=True)
class _Group:
    """`chunks.Stretches` on the device: C stretches of c queries, K keys each."""

    index: torch.Tensor  # (C,) long
    key_index: torch.Tensor  # (C * K,) long
    mask: torch.Tensor  # (C, 1, c, K) bool


class ChunkedTree:
    def __init__(self, chunks: AttentionChunks, device: Any) -> None:
        self._size = chunks.size
        self._groups = [
            _Group(
                torch.from_numpy(group.index).to(device),
                torch.from_numpy(group.key_index).reshape(-1).to(device),
                torch.from_numpy(group.mask)[:, None].to(device),
            )
            for group in chunks.groups
        ]
        self._back = torch.cat([group.index for group in self._groups]).argsort()
        self._added: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        num_heads, num_tokens, width = query.shape[1:]
        key_heads = key.shape[1]
        sharing = num_heads // key_heads  # queries that read the same key head are stacked: no key is copied
        size, num_chunks = self._size, len(self._back)
        filled = functional.pad(query[0], (0, 0, 0, num_chunks * size - num_tokens))
        queries = filled.view(key_heads, sharing, num_chunks, size, width).permute(2, 0, 1, 3, 4)
        queries = queries.reshape(num_chunks, key_heads, sharing * size, width)
        found = torch.cat(
            [
                functional.scaled_dot_product_attention(
                    queries.index_select(0, group.index),
                    _gathered(key, group),
                    _gathered(value, group),
                    attn_mask=added,
                    scale=scaling,
                )
                for group, added in zip(self._groups, self._masks(sharing, query.dtype), strict=True)
            ]
        )
        found = found.index_select(0, self._back)
        found = found.view(num_chunks, key_heads, sharing, size, -1).permute(0, 3, 1, 2, 4)
        return found.reshape(1, num_chunks * size, num_heads, -1)[:, :num_tokens]

    def _masks(self, sharing: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What is added to the scores, (C, 1, sharing * c, K) for each group: made once, since every layer
        would keep one of its own for the backward pass."""
        if (sharing, dtype) not in self._added:
            self._added[sharing, dtype] = [
                torch.zeros(group.mask.shape, dtype=dtype, device=group.mask.device)
                .masked_fill_(~group.mask, float("-inf"))
                .repeat(1, 1, sharing, 1)
                for group in self._groups
            ]
        return self._added[sharing, dtype]


def _gathered(x: torch.Tensor, group: _Group) -> torch.Tensor:
    """(1, key heads, N, D) -> (C, key heads, K, D)."""
    num_chunks, _, _, num_keys = group.mask.shape
    found = x[0].index_select(1, group.key_index)
    return found.view(x.shape[1], num_chunks, num_keys, x.shape[-1]).transpose(0, 1)


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(  # noqa: PLR0917  (transformers calls it so)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_attention: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if tree_attention is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    return tree_attention.attend(query, key, value, kwargs.get("scaling")), None
