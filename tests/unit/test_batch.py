"""The prefix tree: nothing lost, nothing merged that must not be, every token sees its ancestors alone."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.episodes import transition
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.records import token_ids
from lightning_rl.trainer.batches.chunks import attention_chunks
from lightning_rl.trainer.batches.rows import merged_batches, rows_batches
from lightning_rl.trainer.batches.tree import TreeBatch, shared_prefix, tree_batches

UNBOUNDED = 10**9


def path_of(batch: TreeBatch, node: int) -> list[int]:
    """Token ids from the root to `node`, by the mask that the model gets."""
    return batch.input_ids[batch.attention_mask()[node]].tolist()


def seen_through_chunks(batch: TreeBatch) -> np.ndarray:
    """The (N, N) mask that the chunked attention amounts to."""
    chunks = attention_chunks(batch.depth, batch.exit)
    num = len(batch.input_ids)
    full = np.zeros((num, num), dtype=bool)
    for group in chunks.groups:
        assert group.mask.any(axis=2).all()  # no softmax over nothing
        for c, keys, mask in zip(group.index, group.key_index, group.mask, strict=True):
            for q in range(chunks.size):
                if c * chunks.size + q < num:
                    visible = keys[mask[q]]
                    assert len(set(visible.tolist())) == len(visible)
                    full[c * chunks.size + q, visible] = True
    return full


def samples(batches) -> dict[str, list[tuple]]:
    """What each choice's loss terms say, in token order, wherever they were packed."""
    found: dict[str, list[tuple]] = {}
    for batch in batches:
        t = batch.terms
        for i in range(len(t)):
            name = batch.choices[t.row[i]][0]
            found.setdefault(name, []).append(
                (
                    t.column[i],
                    t.target[i],
                    t.behavior_logprob[i],
                    t.temperature[i],
                    t.advantage[i],
                    t.multiplier[i],
                )
            )
    return {name: sorted(rows) for name, rows in found.items()}


def test_a_tree_by_hand():
    #   1 2 -> 3 4        the prompt 1 2 is shared; 3 is sampled by both, 4 and 5 are leaves that nobody
    #      \-> 3 5        has to compute: 1 2 3 are the only tokens
    a = transition("a", [1, 2], [3, 4], behavior=[-0.5, -0.6], advantage=2.0)
    b = transition("b", [1, 2], [3, 5], behavior=[-0.7, -0.8], advantage=-1.0, temperature=0.5)
    (batch,) = tree_batches([a, b], UNBOUNDED)
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert batch.depth.tolist() == [0, 1, 2]
    assert batch.exit.tolist() == [3, 3, 3]
    assert batch.terms.position.tolist() == [1, 2, 1, 2]
    assert batch.terms.target.tolist() == [3, 4, 3, 5]
    assert batch.terms.behavior_logprob.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert batch.terms.advantage.tolist() == [2.0, 2.0, -1.0, -1.0]
    assert batch.terms.temperature.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert batch.call_tokens == 8


def test_siblings_that_sampled_the_same_token_share_a_head_row_and_keep_their_terms():
    twins = [transition(n, [1, 2], [3, 4]) for n in "ab"] + [transition("c", [1, 2], [3, 9])]
    (batch,) = tree_batches(twins, UNBOUNDED)
    head = batch.terms.head_rows()
    assert len(batch.terms) == 6
    assert list(zip(head.position.tolist(), head.target.tolist(), strict=True)) == [(1, 3), (2, 4), (2, 9)]
    assert head.position[head.row_of_term].tolist() == batch.terms.position.tolist()
    assert head.target[head.row_of_term].tolist() == batch.terms.target.tolist()


def test_a_fork_sees_its_own_branch_only():
    (batch,) = tree_batches([transition("a", [1, 2, 3], [9]), transition("b", [1, 4, 5], [9])], UNBOUNDED)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert [path_of(batch, node) for node in range(5)] == [[1], [1, 2], [1, 2, 3], [1, 4], [1, 4, 5]]


def test_the_next_call_of_an_episode_extends_the_one_before():
    first = transition("a", [1, 2], [3, 4])
    second = transition("b", [1, 2, 3, 4, 5], [6])
    (batch,) = tree_batches([second, first], UNBOUNDED)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]


def test_packing_cuts_at_the_shortest_shared_prefix():
    # two families that share 1; within a family 5 tokens are shared. A budget of 12 can't hold all.
    family = [[1, 2, 3, 4, 5], [1, 7, 8, 9, 10]]
    made = [
        transition(f"{f}{i}", [*prompt, 20 + i], [3]) for f, prompt in enumerate(family) for i in range(3)
    ]
    batches = tree_batches(made, 12)
    assert [{name[0] for name, _ in batch.choices} for batch in batches] == [{"0"}, {"1"}]
    assert [len(batch.input_ids) for batch in batches] == [8, 8]


def test_an_episode_is_not_cut_where_the_next_one_would_fit_whole():
    """Three episodes of calls that extend each other, of 16 tokens beyond a shared 4; a budget for one and a
    half of them. Cut inside, the second would be computed twice."""
    made = []
    for episode in range(3):
        prompt = [1, 2, 3, 4]
        for call in range(4):
            prompt = [*prompt, *(100 * episode + 10 * call + k for k in range(10, 14))]
            made.append(transition(f"{episode}-{call}", prompt, [5]))
    batches = tree_batches(made, 30)
    assert [{name[0] for name, _ in batch.choices} for batch in batches] == [{"0"}, {"1"}, {"2"}]
    assert [len(batch.input_ids) for batch in batches] == [20, 20, 20]


def test_sequences_longer_than_the_budget_are_whole_and_still_share():
    prompt = list(range(100))
    made = [transition(f"long{i}", [*prompt, 200 + i], [1]) for i in range(4)]
    (batch,) = tree_batches(made, 8)
    assert len(batch.input_ids) == 104
    other = transition("other", list(range(300, 380)), [1])
    batches = tree_batches([*made, other], 8)
    assert sorted(len(batch.choices) for batch in batches) == [1, 4]


def test_a_budget_bounds_loss_terms_too():
    """64 siblings that all sampled the same: hardly a token each, and a loss term for every one."""
    made = [transition(str(i), [1, 2], [3] * 50) for i in range(64)]
    for pack in (tree_batches, merged_batches):
        batches = pack(made, 200)
        assert [len(batch.terms) for batch in batches] == [200] * 16, pack.__name__
        assert all(batch.input_ids.size == 51 for batch in batches)


def test_rows_have_padding_and_the_same_terms():
    made = [transition("a", [1, 2], [3, 4]), transition("b", [1, 2, 5], [6])]
    (batch,) = rows_batches(made, UNBOUNDED)
    assert batch.input_ids.shape == (2, 3)
    assert samples([batch]) == samples(tree_batches(made, UNBOUNDED))


def test_nothing_makes_no_batches():
    assert tree_batches([], 100) == []
    assert rows_batches([], 100) == []


ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)
transitions = st.lists(
    st.tuples(ids, ids, st.sampled_from([1.0, 0.7]), st.floats(-2, 2, width=32)), min_size=1, max_size=14
).map(
    lambda rows: [
        transition(
            str(i),
            prompt,
            completion,
            temperature=t,
            advantage=a,
            behavior=[-0.01 * (i + k) for k in range(len(completion))],
        )
        for i, (prompt, completion, t, a) in enumerate(rows)
    ]
)


@settings(deadline=None)
@given(transitions, st.integers(1, 60))
def test_every_sequence_can_be_read_back_from_the_tree(made, max_tokens):
    by_name = {t.call_id: t for t in made}
    seen = []
    for batch in tree_batches(made, max_tokens):
        longest = max(len(t.prompt_ids) + len(t.completion_ids) - 1 for t in made)
        assert len(batch.input_ids) <= max(max_tokens, longest + max_tokens // 2)
        assert len(batch.terms) <= max(max_tokens, longest + max_tokens // 2)
        terms = batch.terms
        for i in range(len(terms)):
            source = by_name[batch.choices[terms.row[i]][0]]
            whole = [*source.prompt_ids, *source.completion_ids]
            k = len(source.prompt_ids) + int(terms.column[i])
            assert path_of(batch, terms.position[i]) == whole[:k]
            assert terms.target[i] == whole[k]
            assert batch.depth[terms.position[i]] == k - 1
        seen += [name for name, _ in batch.choices]
    assert sorted(seen) == sorted(by_name)


@settings(deadline=None)
@given(transitions, st.integers(1, 60))
def test_tree_and_rows_hold_the_same_terms_each_once(made, max_tokens):
    tree = samples(tree_batches(made, max_tokens))
    assert tree == samples(rows_batches(made, max_tokens))
    assert tree == samples(merged_batches(made, max_tokens))
    assert sum(map(len, tree.values())) == sum(len(t.completion_ids) for t in made)


@settings(deadline=None)
@given(transitions, st.integers(1, 60))
def test_every_sequence_can_be_read_back_from_merged_rows(made, max_tokens):
    by_name = {t.call_id: t for t in made}
    rows = 0
    for batch in merged_batches(made, max_tokens):
        width = batch.input_ids.shape[1]
        assert len(batch.input_ids) == 1 or batch.input_ids.size <= max_tokens
        assert len(batch.terms) <= max(max_tokens, width)
        rows += len(batch.input_ids)
        for i, position in enumerate(batch.terms.position):
            source = by_name[batch.choices[batch.terms.row[i]][0]]
            whole = [*source.prompt_ids, *source.completion_ids]
            k = len(source.prompt_ids) + int(batch.terms.column[i])
            row, column = divmod(int(position), width)
            assert batch.input_ids[row, : column + 1].tolist() == whole[:k]
            assert batch.attention_mask[row, : column + 1].all()
    sequences = {tuple([*t.prompt_ids, *t.completion_ids][:-1]) for t in made}
    begins = {s for s in sequences if any(other[: len(s)] == s for other in sequences if other != s)}
    if max_tokens >= sum(len(t.completion_ids) for t in made):
        assert rows == len(sequences - begins)
    assert rows >= len(sequences - begins)


@settings(deadline=None)
@given(transitions)
def test_a_tree_computes_no_token_twice(made):
    (batch,) = tree_batches(made, UNBOUNDED)
    prefixes = {
        tuple([*t.prompt_ids, *t.completion_ids][:k])
        for t in made
        for k in range(1, len(t.prompt_ids) + len(t.completion_ids))
    }
    assert len(batch.input_ids) == len(prefixes)


@settings(deadline=None)
@given(transitions)
def test_chunked_attention_sees_what_the_dense_mask_says(made):
    (batch,) = tree_batches(made, UNBOUNDED)
    assert (seen_through_chunks(batch) == batch.attention_mask()).all()


def test_chunked_attention_of_a_long_tree():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 90).tolist()
    made = [
        transition(str(i), [*prompt, *rng.integers(0, 3, 60).tolist()], rng.integers(0, 3, 20).tolist())
        for i in range(12)
    ]
    (batch,) = tree_batches(made, UNBOUNDED)
    groups = attention_chunks(batch.depth, batch.exit).groups
    assert len(groups) > 1
    assert sum(group.mask.size for group in groups) < len(batch.input_ids) ** 2 // 3  # a dense mask is whole
    assert (seen_through_chunks(batch) == batch.attention_mask()).all()


@given(ids, ids)
def test_shared_prefix_is_the_longest(a, b):
    n = shared_prefix(token_ids(a), token_ids(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
