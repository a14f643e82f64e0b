"""Which way of computing a step is the cheapest for the model: a prefix tree, or rows of whole sequences.

A tree computes every shared token once, but its attention costs more for what it sees: on a CPU keys are
gathered for each stretch of queries, on a GPU FlexAttention computes whole blocks. Rows repeat what siblings
share, but are read straight through. Neither always wins, so both are laid out (that costs milliseconds) and
the one with the smaller estimate is computed. Estimates are counts of multiplications and only ever compared
with each other. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...records import Transition
from .blocks import padded, tree_blocks
from .chunks import num_pairs
from .rows import RowsBatch, merged_batches
from .tree import TreeAttention, TreeBatch, tree_batches

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
    transitions: Sequence[Transition], max_tokens: int, shape: ModelShape
) -> Sequence[MicroBatch]:
    """The micro-batches of one step, laid out the cheaper way, or the way that somebody asked for."""
    if not shape.shares_prefixes or shape.layout == "rows":
        return merged_batches(transitions, max_tokens)
    tree = [_computed(batch, shape) for batch in tree_batches(transitions, max_tokens)]
    if shape.layout == "tree":
        return tree
    rows = merged_batches(transitions, max_tokens)
    return tree if _total(tree, shape) < TIE * _total(rows, shape) else rows


def _computed(batch: TreeBatch, shape: ModelShape) -> TreeBatch:
    small = shape.layout == "cheapest" and len(batch.input_ids) < FLEX_MIN_TOKENS
    return batch if small else replace(batch, attention=shape.attention)


def _total(batches: Sequence[MicroBatch], shape: ModelShape) -> float:
    return sum(cost(batch, shape) for batch in batches)


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
