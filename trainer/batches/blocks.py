"""Which blocks of a tree's attention anything is in: what FlexAttention skips, reads whole, or masks.

In depth-first order query q sees key k exactly when k <= q < exit[k] (tree.py), so whether a block is empty
or full follows from the smallest and the largest exit of its keys: the (N, N) mask is never made. Knows no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tree import Ints

BLOCK = 128  # tokens; what FlexAttention's kernels work on by default


@dataclass(frozen=True, slots=True)
class TreeBlocks:
    """A tree padded to whole blocks, n of them. A padding token sees itself alone, and nobody sees it."""

    exit: Ints  # (n * BLOCK,)
    partial: npt.NDArray[np.bool_]  # (n, n) queries, keys: some pairs of the block
    full: npt.NDArray[np.bool_]  # (n, n) all pairs of it

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that are computed."""
        return int(self.partial.sum() + self.full.sum()) * BLOCK * BLOCK


def tree_blocks(exit: Ints) -> TreeBlocks:
    """Of a tree whose N tokens have these exits."""
    num_tokens = len(exit)
    num_blocks = -(-num_tokens // BLOCK)
    exits = np.arange(1, num_blocks * BLOCK + 1)
    exits[:num_tokens] = exit
    by_block = exits.reshape(num_blocks, BLOCK)
    first_query = np.arange(num_blocks)[:, None] * BLOCK
    before = np.tri(num_blocks, k=-1, dtype=np.bool_)  # every key of the block is before every query
    some = before & (by_block.max(axis=1)[None, :] > first_query)
    full = before & (by_block.min(axis=1)[None, :] >= first_query + BLOCK)
    return TreeBlocks(exits, (some & ~full) | np.eye(num_blocks, dtype=np.bool_), full)


def padded(values: Ints) -> Ints:
    """(N,) -> whole blocks."""
    return np.pad(values, (0, -len(values) % BLOCK))
