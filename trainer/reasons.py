"""Why an episode or a choice is not trained: the names that manifests, reports and messages share.

A quarantined choice keeps its `records.Quarantine` value as the reason; these are the others.
"""

from __future__ import annotations

from enum import StrEnum

from ..records import Quarantine


class Reason(StrEnum):
    """Beside `records.Quarantine`. The value is what the manifest's row says."""

    # of an episode: it takes no part in its group's baseline
    EVALUATION = "evaluation"  # purpose is not `train`
    RUNNING = "running"
    FAILED = "failed"
    EXCLUDED = "excluded"
    GAP = "gap"  # a call of it was served but not recorded
    UNREWARDED = "unrewarded"
    UNEQUAL_SOURCES = "unequal_sources"  # judged by other sources than most of its group
    # of a whole group
    LONE_SURVIVOR = "lone_survivor"  # nobody left to compare it with
    ALL_SOLVED = "no_variance:all_solved"
    ALL_FAILED = "no_variance:all_failed"
    EQUAL_REWARDS = "no_variance:equal_rewards"
    EQUAL_ADVANTAGES = "no_variance:equal_advantages"
    MEAN_NOT_POSITIVE = "mean_not_positive"  # the rule divides by it
    # of an episode or a call that a rule can't compare
    NO_BASELINE_YET = "no_baseline_yet"
    NO_SHARED_STATE = "no_shared_state"
    NO_SIBLING_STEP = "no_sibling_step"
    NO_VALUE = "no_value"
    NO_CREDIT = "no_credit"  # the rule said nothing about it
    CRITIC_WARM_UP = "critic_warm_up"  # this step taught the critic alone
    # of one call or choice: it keeps its place in the episode and loses only its loss
    SIDE_CALL = "side_call"
    OTHER_POLICY = "other_policy"
    OTHER_AGENT = "other_agent"
    STALE = "stale"
    NOT_USED = "not_used"
    TOO_LONG = "too_long"
    NO_TRAINABLE_CHOICE = "no_trainable_choice"  # of an episode that counts in the baseline


NO_VARIANCE = frozenset({Reason.ALL_SOLVED, Reason.ALL_FAILED, Reason.EQUAL_REWARDS, Reason.EQUAL_ADVANTAGES})

OF_A_RULE = frozenset(
    {
        *NO_VARIANCE,
        Reason.LONE_SURVIVOR,
        Reason.UNEQUAL_SOURCES,
        Reason.MEAN_NOT_POSITIVE,
        Reason.NO_BASELINE_YET,
        Reason.NO_SHARED_STATE,
        Reason.NO_SIBLING_STEP,
        Reason.NO_VALUE,
        Reason.NO_CREDIT,
        Reason.CRITIC_WARM_UP,
    }
)
"""What a credit rule may say of an episode that was not set aside."""

_CAUSES = {
    Reason.ALL_SOLVED: "every episode solved",
    Reason.ALL_FAILED: "every episode failed",
    Reason.EQUAL_REWARDS: "equal rewards",
    Reason.EQUAL_ADVANTAGES: "equal advantages",
}

_WORDS: dict[str, str] = {
    Reason.EVALUATION: "the episode was made for evaluation",
    Reason.RUNNING: "the episode has not ended",
    Reason.FAILED: "the episode failed, and failed episodes are left out (setting `failed`)",
    Reason.EXCLUDED: "the episode was excluded",
    Reason.GAP: "a call of the episode was served but could not be recorded",
    Reason.UNREWARDED: "nobody gave the episode a reward (setting `unrewarded`)",
    Reason.UNEQUAL_SOURCES: "it was judged by other sources than most of its group",
    Reason.LONE_SURVIVOR: "no other episode is left to compare it with",
    Reason.ALL_SOLVED: "every episode of the group was solved: nothing to prefer",
    Reason.ALL_FAILED: "every episode of the group failed: nothing to prefer",
    Reason.EQUAL_REWARDS: "all rewards of the group are equal: nothing to prefer",
    Reason.EQUAL_ADVANTAGES: "everything that it is compared with is equal",
    Reason.MEAN_NOT_POSITIVE: "the group's mean reward is not above 0, and the rule divides by it",
    Reason.NO_BASELINE_YET: "too few episodes have ended before it",
    Reason.NO_SHARED_STATE: "no other episode of the group was in this state",
    Reason.NO_SIBLING_STEP: "no other episode of the group has a step at this place",
    Reason.NO_VALUE: "the critic has no value for its prompt",
    Reason.NO_CREDIT: "the credit rule said nothing about it",
    Reason.CRITIC_WARM_UP: "the step taught the critic alone (setting `critic_warmup_steps`)",
    Reason.SIDE_CALL: "a side call of the agent's program, not the policy's work",
    "judge_call": "a judge's call",
    "retry_orphan_call": "a client's retry: the answer that was used is another call's",
    Reason.OTHER_POLICY: "another model or policy answered it",
    Reason.OTHER_AGENT: "this agent is not trained (setting `train_agents`)",
    Reason.STALE: "its policy version is too old (setting `max_staleness`)",
    Reason.NOT_USED: "the episode went on with another choice of the call",
    Reason.TOO_LONG: "it, or a call of its episode, is too long to train (settings `max_sequence_tokens`, "
    "`too_long`)",
    Reason.NO_TRAINABLE_CHOICE: "none of its calls can be trained",
    Quarantine.INCOMPLETE: "the engine did not finish the answer",
    Quarantine.NO_PROMPT_IDS: "the log has no prompt ids",
    Quarantine.NO_COMPLETION_IDS: "the log has no completion ids",
    Quarantine.MISALIGNED: "there are not as many logprobs as ids",
    Quarantine.BAD_LOGPROB: "a logprob is missing or impossible",
    Quarantine.COUNT_MISMATCH: "the ids are not as many as the engine counted",
    Quarantine.UNRECORDABLE: "asking for ids would have changed the answer",
    Quarantine.TEMPERATURE_ZERO: "sampled at temperature 0: there is nothing to learn from",
    Quarantine.TRUNCATED_SUPPORT: "top_p, top_k or min_p cut the distribution",
    Quarantine.PENALTIES: "penalties changed the distribution",
    Quarantine.LOGIT_BIAS: "a logit bias changed the distribution",
    Quarantine.CONSTRAINED: "a grammar or a forced tool call constrained the answer",
    Quarantine.IMAGES: "its images are not in the log",
    Quarantine.NOT_POLICY: "no policy of ours served it",
    Quarantine.VERSION_CHANGED: "the weights changed while it was written",
    Quarantine.REDACTED: "parts of it were redacted",
    Quarantine.PROMPT_PARITY: "its translated prompt is not proven to be the engine's own",
}


def cause_of(reason: str) -> str:
    """The part of a no-variance reason that a person reads."""
    return _CAUSES[Reason(reason)]


def in_words(reason: str) -> str:
    """The reason as a sentence; of a rule that we don't know, as it stands."""
    return _WORDS.get(reason, reason)
