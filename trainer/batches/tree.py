"""Transitions -> micro-batches in which a shared prefix is computed once.

All calls of a step, of one episode, of siblings and of other tasks alike, form one prefix tree over token
ids. In lexicographic order neighbours share the longest prefixes, and walking the sorted sequences IS the
depth-first order of the tree: each one adds the tokens beyond what it shares with its predecessor. A token
attends to its ancestors, and in depth-first order k is an ancestor of q (or q itself) exactly when k <= q <
exit[k].

Hidden states depend on weights and tokens only, so choices of different temperatures and policy versions may
share them. Each sampled token keeps its own loss term: nothing is merged where two choices have sampled the
same token.

Knows no torch and no model: arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...records import TokenIds, Transition
from ..credit.base import ChoiceKey

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
TreeAttention = Literal["chunked", "flex"]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One entry per sampled token of every choice, shape (M,) each, choice after choice in token order."""

    position: Ints  # index into the flattened input of the token that predicts
    target: Ints  # the sampled token id
    row: Ints  # which of the micro-batch's choices
    column: Ints  # 0-based index within the completion
    behavior_logprob: Floats
    old_logprob: Floats  # what the ratio is taken against: the behaviour's, if not corrected
    temperature: Floats
    advantage: Floats
    multiplier: Floats

    def __len__(self) -> int:
        return len(self.position)

    def head_rows(self) -> HeadRows:
        """What the head has to compute: siblings that sampled the same token at one place share a row."""
        triples = np.stack([self.temperature.astype(np.float64), self.position, self.target], axis=1)
        unique, inverse = np.unique(triples, axis=0, return_inverse=True)
        return HeadRows(
            temperature=unique[:, 0],
            position=unique[:, 1].astype(np.int64),
            target=unique[:, 2].astype(np.int64),
            row_of_term=inverse.reshape(-1),
        )


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Distinct (temperature, position, target), sorted by temperature; U of them."""

    temperature: npt.NDArray[np.float64]  # (U,)
    position: Ints  # (U,)
    target: Ints  # (U,)
    row_of_term: Ints  # (M,)


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """One forward pass over a forest of shared prefixes, in depth-first order; N tokens, no padding."""

    input_ids: Ints  # (N,)
    depth: Ints  # (N,) position ids: number of ancestors
    exit: Ints  # (N,) one past the last descendant
    terms: LossTerms
    choices: tuple[ChoiceKey, ...]  # by row
    call_tokens: int  # prompt + completion tokens of the choices, before sharing
    attention: TreeAttention = "chunked"  # what is to compute it: packing.py

    def attention_mask(self) -> npt.NDArray[np.bool_]:
        """(N, N): may query q (first axis) see key k?"""
        index = np.arange(len(self.input_ids))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.exit[None, :])


def tree_batches(transitions: Sequence[Transition], max_tokens: int) -> list[TreeBatch]:
    """Pack all transitions of a step into trees of at most `max_tokens` unique tokens and loss terms, or half
    as many more than the longest sequence has, whichever is larger.

    A sequence is never cut, so the longest one fits in any case; without room beside it, sequences of about
    that length would share nothing.
    """
    longest = max((num_context(t) for t in transitions), default=0)
    return [_tree(part) for part in _parts(transitions, max(max_tokens, longest + max_tokens // 2))]


def shared_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of leading ids that both have in common."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] holds, a[:high] == b[:high] does not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def context_of(transition: Transition) -> TokenIds:
    """The tokens that have to be computed: the last sampled one predicts nothing."""
    assert transition.prompt_ids, "a choice without prompt ids is never trained"
    assert transition.completion_ids, "a choice without completion ids is never trained"
    return transition.prompt_ids + transition.completion_ids[:-1]


def num_context(transition: Transition) -> int:
    return len(transition.prompt_ids) + len(transition.completion_ids) - 1


@dataclass(frozen=True, slots=True)
class _Placed:
    """A transition in the sorted order, with what it shares with the one before it in the same
    micro-batch."""

    transition: Transition
    context: TokenIds
    shared: int


def in_tree_order(
    transitions: Sequence[Transition],
) -> tuple[list[tuple[TokenIds, Transition]], list[int]]:
    """The sequences in lexicographic order, and how many leading ids each shares with the one before it."""
    contexts = [(context_of(t), t) for t in transitions]
    contexts.sort(key=lambda pair: (pair[0], pair[1].call_id, pair[1].choice_index))
    return contexts, [0] + [shared_prefix(a, b) for (a, _), (b, _) in pairwise(contexts)]


def _parts(transitions: Sequence[Transition], max_tokens: int) -> Iterator[list[_Placed]]:
    """Cut the sorted order into micro-batches, each time where least has to be computed again."""
    contexts, shared = in_tree_order(transitions)
    start = 0
    while start < len(contexts):
        end, tokens, terms = start, 0, 0
        while end < len(contexts):
            context, transition = contexts[end]
            tokens += len(context) - (shared[end] if end > start else 0)
            terms += len(transition.completion_ids)
            if end > start and max(tokens, terms) > max_tokens:
                end = _best_cut(contexts, shared, (start, end), max_tokens)
                break
            end += 1
        yield [
            _Placed(transition, context, shared[i] if i > start else 0)
            for i, (context, transition) in enumerate(contexts[start:end], start)
        ]
        start = end


def _best_cut(
    contexts: Sequence[tuple[TokenIds, Transition]],
    shared: Sequence[int],
    between: tuple[int, int],
    max_tokens: int,
) -> int:
    """Where the next micro-batch begins, the second of `between` at the latest.

    What it shares with this one it computes again, so the best place leaves most new tokens for each that is
    computed; an eighth of the budget is counted with every micro-batch, since small ones are slow.
    """
    start, latest = between
    best, best_yield = latest, -1.0
    tokens = 0
    for i in range(start, latest):
        tokens += len(contexts[i][0]) - (shared[i] if i > start else 0)
        found = (tokens - shared[i + 1]) / (tokens + max_tokens // 8)
        if found >= best_yield:
            best, best_yield = i + 1, found
    return best


def _tree(part: Sequence[_Placed]) -> TreeBatch:
    ids: list[int] = []
    depth: list[int] = []
    exits: list[int] = []
    path: list[int] = []  # the nodes from the root to the newest one
    rows = []
    for placed in part:
        for node in path[placed.shared :]:
            exits[node] = len(ids)
        del path[placed.shared :]
        new = placed.context[placed.shared :]
        first = len(ids)
        ids.extend(new)
        depth.extend(range(placed.shared, len(placed.context)))
        exits.extend([0] * len(new))
        path.extend(range(first, first + len(new)))
        num_prompt = len(placed.transition.prompt_ids)
        rows.append(path[num_prompt - 1 : len(placed.context)])
    for node in path:
        exits[node] = len(ids)
    chosen = [placed.transition for placed in part]
    return TreeBatch(
        input_ids=np.array(ids, dtype=np.int64),
        depth=np.array(depth, dtype=np.int64),
        exit=np.array(exits, dtype=np.int64),
        terms=loss_terms(chosen, rows),
        choices=tuple((t.call_id, t.choice_index) for t in chosen),
        call_tokens=num_call_tokens(chosen),
    )


def loss_terms(transitions: Sequence[Transition], positions: Sequence[Sequence[int]]) -> LossTerms:
    """`positions[i]` holds, for each sampled token of transition i, where the token before it is."""
    lengths = [len(t.completion_ids) for t in transitions]
    assert lengths == [len(p) for p in positions], "one predicting position per sampled token"

    def each(values: Sequence[float]) -> Floats:
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    behavior = np.concatenate([np.array(t.behavior_logprobs, dtype=np.float32) for t in transitions])

    return LossTerms(
        position=np.concatenate([np.array(p, dtype=np.int64) for p in positions]),
        target=np.concatenate([np.array(t.completion_ids, dtype=np.int64) for t in transitions]),
        row=np.repeat(np.arange(len(transitions)), lengths),
        column=np.concatenate([np.arange(length) for length in lengths]),
        behavior_logprob=behavior,
        old_logprob=behavior,
        temperature=each([t.temperature for t in transitions]),
        advantage=each([t.advantage for t in transitions]),
        multiplier=each([t.multiplier for t in transitions]),
    )


def num_call_tokens(transitions: Sequence[Transition]) -> int:
    return sum(len(t.prompt_ids) + len(t.completion_ids) for t in transitions)
