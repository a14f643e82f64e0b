"""Which way of computing a step is the cheapest for the model: a prefix tree, or rows of whole sequences.

A tree computes every shared token once, but its attention costs more for what it sees: on a CPU keys are
gathered for each stretch of queries, on a GPU FlexAttention computes whole blocks. Rows repeat what siblings
share, but are read straight through. Neither always wins, so both are laid out (that costs milliseconds) and
the one with the smaller estimate is computed. Estimates are counts of multiplications and only ever compared
with each other. Where a step is computed by several ranks, its micro-batches are dealt out by the same
estimates. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from ...records import Transition
from .blocks import padded, tree_blocks
from .chunks import num_pairs
from .rows import RowsBatch, merged_batches
from .tree import LossTerms, TreeAttention, TreeBatch, tree_batches

MicroBatch = TreeBatch | RowsBatch

FLEX_MIN_TOKENS = 1024
"""Below, FlexAttention's blocks cost more than they skip (0.72 of dense attention at 512 tokens, says
KempnerForge's measurement; facts of ours from a GPU there are none yet)."""

CAUSAL_PAIR, MASKED_PAIR = 0.9, 1.3
"""What a query-key pair costs over a multiplication of the weights: of the whole square where rows need no
mask (half of it is skipped), and of a pair that is computed with one. Measured on two CPU cores, for heads of
32 and 64: 0.85 to 0.93, 1.16 to 1.43. On a GPU they are a guess."""

TIE = 0.9  # estimates are no finer than that, and a tree gathers copies


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one token and one pair of query and key cost, in multiplications, over all layers; and what this
    model's attention can be computed with on its device."""

    per_token: float
    per_pair: float
    shares_prefixes: bool  # whether a prefix tree gives what the model would give
    attention: TreeAttention = "chunked"  # of trees
    layout: Literal["cheapest", "tree", "rows"] = "cheapest"
    note: str | None = None  # what a person should know of it, in one line


def cheapest_batches(
    transitions: Sequence[Transition], max_tokens: int, shape: ModelShape, num_ranks: int = 1
) -> Sequence[MicroBatch]:
    """The micro-batches of one step, laid out the cheaper way, or the way that somebody asked for; for
    several ranks in as many as can be dealt out evenly."""

    def trees(transitions: Sequence[Transition], max_tokens: int) -> list[TreeBatch]:
        return [_computed(batch, shape) for batch in tree_batches(transitions, max_tokens)]

    if not shape.shares_prefixes or shape.layout == "rows":
        return _for_ranks(merged_batches, transitions, max_tokens, num_ranks)
    tree = _for_ranks(trees, transitions, max_tokens, num_ranks)
    if shape.layout == "tree":
        return tree
    rows = _for_ranks(merged_batches, transitions, max_tokens, num_ranks)
    return tree if _slowest(tree, shape, num_ranks) < TIE * _slowest(rows, shape, num_ranks) else rows


def _computed(batch: TreeBatch, shape: ModelShape) -> TreeBatch:
    small = shape.layout == "cheapest" and len(batch.input_ids) < FLEX_MIN_TOKENS
    return batch if small else replace(batch, attention=shape.attention)


class _Layout(Protocol):
    def __call__(self, transitions: Sequence[Transition], max_tokens: int) -> Sequence[MicroBatch]: ...


def _for_ranks(
    layout: _Layout, transitions: Sequence[Transition], max_tokens: int, num_ranks: int
) -> Sequence[MicroBatch]:
    """Of the budgets that need no more rounds (a micro-batch on each rank) than `max_tokens` does, the
    smallest: it cuts the step most evenly."""
    found = layout(transitions, max_tokens)
    if num_ranks == 1:
        return found
    most = num_rounds(len(found), num_ranks) * num_ranks
    low, high = 0, max_tokens
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        smaller = layout(transitions, middle)
        if len(smaller) <= most:
            found, high = smaller, middle
        else:
            low = middle
    return found


def num_rounds(num_batches: int, num_ranks: int) -> int:
    """Micro-batches of each rank."""
    return -(-num_batches // num_ranks)


def _slowest(batches: Sequence[MicroBatch], shape: ModelShape, num_ranks: int) -> float:
    return max(sum(cost(batch, shape) for batch in part) for part in dealt(batches, shape, num_ranks))


def dealt(batches: Sequence[MicroBatch], shape: ModelShape, num_ranks: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank: as many on every one, of as equal a cost as can be. Ranks meet in every
    backward pass, so one that is short gets micro-batches without weight."""
    rounds = num_rounds(len(batches), num_ranks)
    parts: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for batch in sorted(batches, key=lambda batch: cost(batch, shape), reverse=True):
        rank = min((r for r in range(num_ranks) if len(parts[r]) < rounds), key=lambda r: costs[r])
        parts[rank].append(batch)
        costs[rank] += cost(batch, shape)
    for part in parts:
        part.extend(weightless(batches[0]) for _ in range(rounds - len(part)))
    return parts


def weightless(batch: MicroBatch) -> RowsBatch:
    """One token of `batch`, with a gradient of exactly zero. It counts as no call's (call_tokens is 0)."""
    none = np.zeros(1, dtype=np.int64)
    zero = np.zeros(1, dtype=np.float32)
    first = batch.input_ids.reshape(-1)[:1]
    terms = LossTerms(
        position=none,
        target=first,
        row=none,
        column=none,
        behavior_logprob=zero,
        old_logprob=zero,
        temperature=np.ones(1, dtype=np.float32),
        advantage=zero,
        multiplier=zero,
    )
    return RowsBatch(first[None], np.ones((1, 1), dtype=np.int64), terms, batch.choices[:1], call_tokens=0)


def cost(batch: MicroBatch, shape: ModelShape) -> float:
    """Of one forward pass; the head is left out, since both ways compute the same rows of it."""
    if isinstance(batch, RowsBatch):
        num_rows, width = batch.input_ids.shape
        tokens = int(num_rows * width)
        padding = bool((batch.attention_mask == 0).any())
        pairs = tokens * int(width) * (MASKED_PAIR if padding else CAUSAL_PAIR)
    elif batch.attention == "flex":
        tokens = len(padded(batch.input_ids))
        pairs = tree_blocks(batch.exit).num_pairs * MASKED_PAIR
    else:
        tokens = len(batch.input_ids)
        pairs = num_pairs(batch.depth) * MASKED_PAIR
    return tokens * shape.per_token + pairs * shape.per_pair
