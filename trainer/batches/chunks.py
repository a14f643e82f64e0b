"""A tree's attention in dense pieces: which keys each stretch of the depth-first order has to read.

A stretch sees itself and the ancestors of its first token, and nothing else. Stretches near the root read
few keys and deep ones many, so stretches of like width are computed together. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
NUM_WIDTHS = 8  # with one width alone, a third of what is computed would be padding
GATHER_COST = 16.0
"""What fetching one key costs, in query-key pairs: 3 to 8 where it was measured (two CPU cores, heads of 32
and 64), and the copies take memory, too."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """C stretches of c queries, with K keys for each, padding included. A padded query sees its stretch's
    first key, so that no softmax is over nothing; its result is thrown away."""

    index: Ints  # (C,) which stretches of the batch
    key_index: Ints  # (C, K) index into the N tokens
    mask: npt.NDArray[np.bool_]  # (C, c, K)


@dataclass(frozen=True, slots=True)
class AttentionChunks:
    size: int  # c
    groups: tuple[Stretches, ...]  # each stretch is in one of them


def attention_chunks(depth: Ints, exit: Ints) -> AttentionChunks:
    """Of a tree with N tokens of this depth and exit (tree.py)."""
    size = _best_size(depth)
    groups = tuple(_stretches(group, size, exit) for group in _by_width(depth, size))
    return AttentionChunks(size, groups)


def num_pairs(depth: Ints) -> float:
    """Query-key pairs that are computed, gathering included."""
    return _cost(depth, _best_size(depth))


def _best_size(depth: Ints) -> int:
    return min(SIZES, key=lambda size: _cost(depth, size))


def _cost(depth: Ints, size: int) -> float:
    return sum(len(group) * int(_widths(depth, size)[group].max()) for group in _by_width(depth, size)) * (
        size + GATHER_COST
    )


def _widths(depth: Ints, size: int) -> Ints:
    """(C,) keys that each stretch reads; the last one is short and counted as whole."""
    return depth[::size] + size


def _by_width(depth: Ints, size: int) -> Iterator[Ints]:
    """Which stretches are computed together."""
    widths = _widths(depth, size)
    step = max(-(-int(widths.max()) // NUM_WIDTHS), size)
    rank = -(-widths // step)
    for value in np.unique(rank):
        yield np.flatnonzero(rank == value)


def _stretches(index: Ints, size: int, exit: Ints) -> Stretches:
    starts = index * size
    visible = [_keys(int(start), size, exit) for start in starts]
    width = max(len(keys) for keys in visible)
    key_index = np.zeros((len(visible), width), dtype=np.int64)
    mask = np.zeros((len(visible), size, width), dtype=np.bool_)
    for chunk, (start, keys) in enumerate(zip(starts, visible, strict=True)):
        queries = np.arange(start, min(start + size, len(exit)))
        key_index[chunk, : len(keys)] = keys
        mask[chunk, : len(queries), : len(keys)] = (keys[None, :] <= queries[:, None]) & (
            queries[:, None] < exit[keys][None, :]
        )
        mask[chunk, len(queries) :, 0] = True
    return Stretches(index, key_index, mask)


def _keys(start: int, size: int, exit: Ints) -> Ints:
    ancestors = np.flatnonzero(exit[:start] > start)
    return np.concatenate([ancestors, np.arange(start, min(start + size, len(exit)))])
