"""When a watching run takes a group: not before what may still come has had its time."""

from __future__ import annotations

import pytest
from fakes.episodes import episode

from lightning_rl.records import EpisodeStatus, Group, Purpose
from lightning_rl.trainer.planning.source import GRACE_MS, is_settled

ENDED_AT_MS = 1  # of the fake episodes


def settled_after(group: Group) -> str:
    """Whether the group is taken "at once", "later" or "never"."""
    if is_settled(group, ENDED_AT_MS):
        return "at once"
    return "later" if is_settled(group, ENDED_AT_MS + GRACE_MS + 1) else "never"


def group(*episodes, expected_size=None) -> Group:
    return Group("g", "task", "", expected_size, episodes)


@pytest.mark.parametrize(
    ("made", "taken"),
    [
        (group(episode("a", 1.0), episode("b", 0.0), expected_size=2), "at once"),
        (group(episode("a", 1.0), episode("b"), expected_size=2), "later"),  # a reward may still come
        (group(episode("a", 1.0), expected_size=1), "at once"),
        (
            group(episode("a", 1.0), episode("b", 0.0)),
            "later",
        ),  # so may an episode: nobody said how many
        (group(episode("a", 1.0)), "never"),  # nothing to compare it with
        (group(episode("a", 1.0), episode("b", status=EpisodeStatus.FAILED)), "never"),
        (group(episode("a", 1.0), episode("b", 0.0, purpose=Purpose.EVAL)), "never"),
    ],
)
def test_a_group_is_taken_when_nothing_more_is_to_be_expected(made, taken):
    assert settled_after(made) == taken


def test_a_rule_that_needs_no_sibling_takes_a_group_of_one_once_nothing_more_comes():
    alone = group(episode("a", 1.0))
    assert not is_settled(alone, ENDED_AT_MS, fewest_episodes=1)
    assert is_settled(alone, ENDED_AT_MS + GRACE_MS + 1, fewest_episodes=1)
    assert not is_settled(group(), ENDED_AT_MS + GRACE_MS + 1, fewest_episodes=1)
