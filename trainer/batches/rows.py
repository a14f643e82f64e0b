"""Transitions -> micro-batches of right-padded rows: without sharing, or with each sequence inside a longer
one.

The first is the reference that everything is held to. The second computes a call once more for each row that
it is in, but not for the later calls of its own episode; it is right for any causal model (sliding windows
and linear layers too), and quicker than a tree where there is nothing but plain continuation. Knows no torch
and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...records import TokenIds, Transition
from ..credit.base import ChoiceKey
from .tree import (
    Ints,
    LossTerms,
    context_of,
    in_tree_order,
    loss_terms,
    num_call_tokens,
    num_context,
)


@dataclass(frozen=True, slots=True)
class RowsBatch:
    """Right-padded rows, each of which holds one or more choices' sequences."""

    input_ids: Ints  # (B, L)
    attention_mask: Ints  # (B, L) 1 where there is a token
    terms: LossTerms  # `position` indexes the flattened (B * L); `row` the choices, not the rows here
    choices: tuple[ChoiceKey, ...]
    call_tokens: int


@dataclass(frozen=True, slots=True)
class _Row:
    """The longest sequence, and every choice whose own sequence is a prefix of it."""

    ids: TokenIds
    members: tuple[Transition, ...]


def rows_batches(transitions: Sequence[Transition], max_tokens: int) -> list[RowsBatch]:
    """One row per choice, rows of similar length together, at most `max_tokens` tokens per micro-batch,
    padding included."""
    ordered = sorted(transitions, key=lambda t: (num_context(t), t.call_id, t.choice_index))
    return _packed([_Row(context_of(t), (t,)) for t in ordered], max_tokens)


def merged_batches(transitions: Sequence[Transition], max_tokens: int) -> list[RowsBatch]:
    """One row per sequence that is not the beginning of another one; packed likewise. Where many choices have
    sampled one and the same sequence, it is computed again for each budget of loss terms."""
    contexts, shared = in_tree_order(transitions)
    rows: list[_Row] = []
    members: list[Transition] = []
    for i, (ids, transition) in enumerate(contexts):
        members.append(transition)
        # In this order a sequence that begins another one also begins the next.
        if (
            i + 1 == len(contexts)
            or shared[i + 1] < len(ids)
            or _num_terms(members) + len(contexts[i + 1][1].completion_ids) > max(max_tokens, len(ids))
        ):
            rows.append(_Row(ids, tuple(members)))
            members = []
    rows.sort(key=lambda row: (len(row.ids), row.members[0].call_id))
    return _packed(rows, max_tokens)


def _packed(rows: Sequence[_Row], max_tokens: int) -> list[RowsBatch]:
    """`rows` by length: the last of a micro-batch is its longest."""
    parts: list[list[_Row]] = []
    terms = 0
    for row in rows:
        if (
            not parts
            or (len(parts[-1]) + 1) * len(row.ids) > max_tokens
            or terms + _num_terms(row.members) > max_tokens
        ):
            parts.append([])
            terms = 0
        parts[-1].append(row)
        terms += _num_terms(row.members)
    return [_batch(part) for part in parts]


def _num_terms(members: Sequence[Transition]) -> int:
    return sum(len(transition.completion_ids) for transition in members)


def _batch(rows: Sequence[_Row]) -> RowsBatch:
    width = max(len(row.ids) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    attention_mask = np.zeros((len(rows), width), dtype=np.int64)
    chosen: list[Transition] = []
    positions = []
    for i, row in enumerate(rows):
        input_ids[i, : len(row.ids)] = row.ids
        attention_mask[i, : len(row.ids)] = 1
        for transition in row.members:
            chosen.append(transition)
            first = i * width + len(transition.prompt_ids) - 1
            positions.append(list(range(first, first + len(transition.completion_ids))))
    return RowsBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        terms=loss_terms(chosen, positions),
        choices=tuple((t.call_id, t.choice_index) for t in chosen),
        call_tokens=num_call_tokens(chosen),
    )
