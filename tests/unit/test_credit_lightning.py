"""LightningRL against hand-computed numbers, and the properties that every rule has to keep."""

from __future__ import annotations

import math

import pytest
from fakes.episodes import call, episode, judged
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.errors import SettingsError
from lightning_rl.trainer.credit.base import CreditOptions
from lightning_rl.trainer.credit.lightning import group_reason, lightning
from lightning_rl.trainer.credit.registry import RULES, credit_rule
from lightning_rl.trainer.reasons import Reason

SCALED, CENTRED = CreditOptions(scale_by_std=True), CreditOptions(scale_by_std=False)


def test_four_episodes_by_hand():
    # rewards 1 0 0 1: mean 0.5, sample variance (4 * 0.25) / 3 = 1/3, std 0.57735; 0.5 / 0.57735 = 0.866025
    group = judged([1.0, 0.0, 0.0, 1.0])
    credits = lightning(group, SCALED)
    assert [credits[f"e{i}-c0", 0].advantage for i in range(4)] == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    )
    centred = lightning(group, CENTRED)
    assert [centred[f"e{i}-c0", 0].advantage for i in range(4)] == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_the_baseline_counts_episodes_not_calls():
    # e0 made 5 calls. Over calls the mean would be (5 * 1 + 0) / 6; over episodes it is 0.5.
    group = judged([1.0, 0.0], calls=[5, 1])
    credits = lightning(group, CENTRED)
    assert [credits[f"e0-c{k}", 0].advantage for k in range(5)] == [0.5] * 5
    assert credits["e1-c0", 0].advantage == -0.5


def test_every_choice_of_every_call_gets_the_episodes_advantage():
    group = judged([1.0, 0.0], calls=[2, 1], choices=3)
    credits = lightning(group, CENTRED)
    assert len(credits) == 9
    assert {credits["e0-c1", index].advantage for index in range(3)} == {0.5}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0, 1.0, 1.0], Reason.ALL_SOLVED),
        ([0.0, 0.0], Reason.ALL_FAILED),
        ([-1.0, -1.0], Reason.ALL_FAILED),
        ([0.5, 0.5], Reason.EQUAL_REWARDS),
        ([0.1 + 0.2, 0.3], Reason.EQUAL_REWARDS),  # one number, added up in two orders
        ([0.7], Reason.LONE_SURVIVOR),
        ([], Reason.LONE_SURVIVOR),
        ([1.0, 0.0], None),
        ([1e-6, 0.0], None),
    ],
)
def test_a_group_without_variance_says_why(values, reason):
    assert group_reason(values) is reason


def test_none_is_not_zero():
    credits = lightning(judged([1.0, 1.0]), SCALED)
    assert {(credit.advantage, credit.reason) for credit in credits.values()} == {(None, Reason.ALL_SOLVED)}


def test_an_episode_that_is_set_aside_moves_no_baseline():
    with_it = judged([1.0, 0.0, None], set_aside={2: Reason.UNREWARDED})
    credits = lightning(with_it, SCALED)
    without = lightning(judged([1.0, 0.0]), SCALED)
    assert credits["e0-c0", 0] == without["e0-c0", 0]
    assert credits["e2-c0", 0].advantage is None
    assert credits["e2-c0", 0].reason == Reason.UNREWARDED


def test_a_lone_survivor_gets_no_made_up_advantage():
    group = judged([1.0, None, 0.0], set_aside={1: Reason.FAILED, 2: Reason.GAP})
    credits = lightning(group, SCALED)
    assert credits["e0-c0", 0].advantage is None
    assert credits["e0-c0", 0].reason == Reason.LONE_SURVIVOR


values = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


@given(values)
def test_advantages_of_a_group_sum_to_zero_and_have_unit_deviation(rewards):
    credits = lightning(judged(rewards), SCALED)
    advantages = [credits[f"e{i}-c0", 0].advantage for i in range(len(rewards))]
    if group_reason(rewards) is not None:
        assert set(advantages) == {None}
        return
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    assert math.fsum(a * a for a in advantages) == pytest.approx(len(rewards) - 1, rel=1e-6)


@given(values, st.integers(0, 7), st.integers(2, 6), st.randoms(use_true_random=False))
def test_more_calls_or_another_order_change_no_advantage(rewards, who, extra, random):
    before = lightning(judged(rewards), SCALED)
    longer = [1] * len(rewards)
    longer[who % len(rewards)] = extra
    group = judged(rewards, calls=longer)
    episodes = list(group.episodes)
    random.shuffle(episodes)
    after = lightning(type(group)(group.id, group.task_id, tuple(episodes)), SCALED)
    for i in range(len(rewards)):
        a, b = before[f"e{i}-c0", 0].advantage, after[f"e{i}-c0", 0].advantage
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b)


def test_rules_are_found_by_name():
    assert credit_rule("lightning") is lightning
    assert set(RULES) == {"lightning"}
    with pytest.raises(SettingsError, match="'gae'; there is: lightning"):
        credit_rule("gae")


def test_the_fakes_count_their_calls():
    made = episode("e", calls=[call("a", [1], [2]), call("b", [1], [3])])
    assert [c.ordinal for c in made.calls] == [0, 1]
