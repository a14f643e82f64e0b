"""Why an episode or a choice is not trained: the names that manifests, reports and messages share.

A quarantined choice keeps its `records.Quarantine` value as the reason; these are the others.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Beside `records.Quarantine`. The value is what the manifest's row says."""

    # of an episode: it takes no part in its group's baseline
    EVALUATION = "evaluation"  # purpose is not `train`
    RUNNING = "running"
    FAILED = "failed"
    EXCLUDED = "excluded"
    GAP = "gap"  # a call of it was served but not recorded
    UNREWARDED = "unrewarded"
    # of a whole group
    LONE_SURVIVOR = "lone_survivor"  # nobody left to compare it with
    ALL_SOLVED = "no_variance:all_solved"
    ALL_FAILED = "no_variance:all_failed"
    EQUAL_REWARDS = "no_variance:equal_rewards"
    # of one call or choice: it keeps its place in the episode and loses only its loss
    SIDE_CALL = "side_call"
    OTHER_POLICY = "other_policy"
    STALE = "stale"
    NOT_USED = "not_used"
    NO_TRAINABLE_CHOICE = "no_trainable_choice"  # of an episode that counts in the baseline


NO_VARIANCE = frozenset({Reason.ALL_SOLVED, Reason.ALL_FAILED, Reason.EQUAL_REWARDS})

_CAUSES = {
    Reason.ALL_SOLVED: "every episode solved",
    Reason.ALL_FAILED: "every episode failed",
    Reason.EQUAL_REWARDS: "equal rewards",
}


def cause_of(reason: str) -> str:
    """The part of a no-variance reason that a person reads."""
    return _CAUSES[Reason(reason)]
