"""Which reward rows count, by hand."""

import random

import pytest
from fakes.log_rows import reward
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.records import Reward, RewardTarget
from lightning_rl.store.rewards import EPISODE, fate_of_rows, resolve, resolve_parts


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


def test_sources_are_averaged_by_their_weights() -> None:
    rows = [reward(value=1.0, source="human", id="h"), reward(value=0.0, source="judge", id="j")]
    found = resolve(rows, {"human": 3.0})
    assert found.value == 0.75
    assert found.path == "mean of human=1 (weight 3), judge=0 = 0.75"
    silenced = resolve(rows, {"human": 0.0})
    assert (silenced.value, silenced.sources) == (0.0, ("judge",))
    nobody = resolve(rows, {"human": 0.0, "judge": 0.0})
    assert nobody.value is None
    assert "weight 0" in nobody.path
    assert resolve(rows, only=frozenset({"human"})).value == 1.0


def test_every_level_is_resolved_by_itself() -> None:
    rows = [
        reward(value=1.0, id="e"),
        reward(value=0.5, id="a1", target=RewardTarget.AGENT, agent="writer", created_at_ms=1),
        reward(value=0.7, id="a2", target=RewardTarget.AGENT, agent="writer", created_at_ms=2),
        reward(value=0.1, id="c", target=RewardTarget.CALL, call_id="c1"),
        reward(value=0.2, id="c0", target=RewardTarget.CALL, call_id="c1", choice_index=0),
        reward(value=0.3, id="t", target=RewardTarget.TOKENS, call_id="c1", token_start=0, token_end=4),
        reward(value=0.4, id="gone", target=RewardTarget.CALL, call_id="c2"),
        reward(value=0.4, id="s", supersedes="gone", target=RewardTarget.CALL, call_id="c3"),
    ]
    found = {part.describe(): resolution.value for part, resolution in resolve_parts(rows).items()}
    assert found == {
        "episode": 1.0,
        "agent writer": 0.7,
        "call c1": 0.1,
        "call c1 choice 0": 0.2,
        "call c1 choice 0 tokens 0-4": 0.3,
        "call c3": 0.4,
    }
    assert resolve_parts(rows)[EPISODE] == resolve(rows)
    fates = fate_of_rows(rows, {"test": 1.0})
    assert fates["a1"] == "older than a2"
    assert fates["gone"] == "superseded by s"
    assert {fates[name] for name in ("e", "a2", "c", "c0", "t", "s")} == {"counts"}
    assert set(fate_of_rows(rows[:1], {"test": 0.0}).values()) == {"its source weighs 0"}
