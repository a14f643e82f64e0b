"""Which reward rows count, by hand."""

import random

import pytest
from fakes.log_rows import reward
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.records import Reward, RewardTarget
from lightning_rl.store.rewards import resolve


def test_no_reward_is_not_zero() -> None:
    assert resolve([]).value is None
    assert resolve([]).path == "no reward"
    part = reward(target=RewardTarget.CALL, call_id="c")
    assert resolve([part]).value is None
    assert resolve([part]).path == "no reward about the episode (1 about parts of it)"


def test_one_row_is_its_value() -> None:
    row = reward(value=0.1)
    assert resolve([row]).value == 0.1
    assert resolve([row]).reward_ids == (row.id,)
    assert resolve([row]).path == "test=0.1"


def test_the_newest_of_each_source_and_their_mean() -> None:
    rows = [
        reward(value=5.0, source="judge", created_at_ms=1, id="a"),
        reward(value=1.0, source="judge", created_at_ms=2, id="b"),
        reward(value=0.5, source="tests", created_at_ms=1, id="c"),
        reward(value=9.0, source="tests", created_at_ms=1, id="b2"),  # same time: the greater id is newer
    ]
    found = resolve(rows)
    assert found.value == 0.75
    assert found.reward_ids == ("b", "c")
    assert found.sources == ("judge", "tests")
    assert found.path == "mean of judge=1, tests=0.5 = 0.75 (2 older or superseded)"


def test_superseded_rows_do_not_count_whoever_superseded_them() -> None:
    first = reward(value=1.0, source="cli", id="a")
    correction = reward(value=0.0, source="person", id="b", supersedes="a")
    assert resolve([first, correction]).value == 0.0
    withdrawn = reward(target=RewardTarget.CALL, call_id="c", id="d", supersedes="b")
    assert resolve([first, correction, withdrawn]).value is None
    assert (
        resolve([first, correction, withdrawn]).path
        == "no reward: all 2 rows about the episode are superseded"
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=8
    ),
    st.randoms(),
)
def test_the_order_of_the_rows_does_not_matter(
    said: list[tuple[str, float, int]], shuffler: random.Random
) -> None:
    rows: list[Reward] = [
        reward(value=value, source=source, created_at_ms=at, id=str(number))
        for number, (source, value, at) in enumerate(said)
    ]
    shuffled = rows[:]
    shuffler.shuffle(shuffled)
    assert resolve(shuffled) == resolve(rows)
    value = resolve(rows).value
    assert value is not None
    assert min(row.value for row in rows) - 1e-9 <= value <= max(row.value for row in rows) + 1e-9


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_zero_and_negative_are_rewards(value: float) -> None:
    assert resolve([reward(value=value)]).value == value
