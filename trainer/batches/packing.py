"""Which way of computing a step is the cheapest for the model: a prefix tree, or rows of whole sequences.

A tree computes every shared token once, but its attention gathers keys for each stretch of queries; rows
repeat what siblings share, but are read straight through. Neither always wins, so both are laid out (that
costs milliseconds) and the one with the smaller estimate is computed. Estimates are counts of multiplications
and only ever compared with each other. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...records import Transition
from .rows import RowsBatch, merged_batches
from .tree import TreeBatch, attention_cost, tree_batches

MicroBatch = TreeBatch | RowsBatch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one token and one pair of query and key cost, in multiplications, over all layers."""

    per_token: float
    per_pair: float
    shares_prefixes: bool  # whether a prefix tree gives what the model would give


def cheapest_batches(
    transitions: Sequence[Transition], max_tokens: int, shape: ModelShape
) -> Sequence[MicroBatch]:
    """The micro-batches of one step, laid out the cheaper way."""
    rows = merged_batches(transitions, max_tokens)
    if not shape.shares_prefixes:
        return rows
    tree = tree_batches(transitions, max_tokens)
    return tree if _total(tree, shape) <= _total(rows, shape) else rows


def _total(batches: Sequence[MicroBatch], shape: ModelShape) -> float:
    return sum(cost(batch, shape) for batch in batches)


def cost(batch: MicroBatch, shape: ModelShape) -> float:
    """Of one forward pass; the head is left out, since both ways compute the same rows of it."""
    if isinstance(batch, TreeBatch):
        return len(batch.input_ids) * shape.per_token + attention_cost(batch.depth) * shape.per_pair
    num_rows, width = batch.input_ids.shape
    # A mask of padding makes attention compute the whole square.
    tokens = int(num_rows * width)
    return tokens * (shape.per_token + int(width) * shape.per_pair)
