"""What each weighting makes of one step, by hand, and that the rows of an episode weigh what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.trainer.planning.weights import CONSTANT_TOKENS, TrainedChoice, multipliers

# a: 3 + 1 tokens in two calls, b: 6 in one; |E| = 2, 10 tokens in all
TRAINED = {
    ("a1", 0): TrainedChoice("a", 3),
    ("a2", 0): TrainedChoice("a", 1),
    ("b1", 0): TrainedChoice("b", 6),
}


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("episode", [1 / 8, 1 / 8, 1 / 12]),
        ("token", [1 / 10, 1 / 10, 1 / 10]),
        ("constant", [1 / (2 * CONSTANT_TOKENS)] * 3),
    ],
)
def test_by_hand(weighting, expected):
    assert list(multipliers(TRAINED, weighting).values()) == pytest.approx(expected)


def test_nothing_trained_has_no_weights():
    assert multipliers({}, "episode") == {}


steps = st.dictionaries(
    st.tuples(st.text("abc", min_size=1, max_size=3), st.integers(0, 2)),
    st.builds(TrainedChoice, st.sampled_from("uvwxyz"), st.integers(1, 50)),
    min_size=1,
)


@given(steps)
def test_episodes_weigh_the_same(trained):
    weights = multipliers(trained, "episode")
    share: dict[str, float] = {}
    for key, choice in trained.items():
        share[choice.episode_id] = share.get(choice.episode_id, 0) + weights[key] * choice.num_tokens
    assert list(share.values()) == pytest.approx([1 / len(share)] * len(share))


@given(steps)
def test_tokens_weigh_the_same_and_all_together_one(trained):
    weights = multipliers(trained, "token")
    assert len(set(weights.values())) == 1
    assert sum(weights[key] * choice.num_tokens for key, choice in trained.items()) == pytest.approx(1)


@given(steps, st.sampled_from(["episode", "token", "constant"]))
def test_splitting_an_episodes_call_in_two_changes_no_tokens_weight(trained, weighting):
    key, choice = next(iter(trained.items()))
    if choice.num_tokens < 2:
        return
    split = dict(trained)
    split[key] = TrainedChoice(choice.episode_id, choice.num_tokens - 1)
    split["new", 9] = TrainedChoice(choice.episode_id, 1)
    assert multipliers(split, weighting)["new", 9] == pytest.approx(multipliers(trained, weighting)[key])


def test_the_constant_is_a_setting():
    assert set(multipliers(TRAINED, "constant", 5).values()) == {1 / (2 * 5)}
