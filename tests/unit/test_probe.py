"""The probe's judgement, on numbers made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.proxy.publishing.probe import PrimedPrompt, Result, judge_cache, judge_weights

BEFORE = [-1.0] * 20
# Eight tokens move by half a nat or more, twelve by a hundredth.
STEP = [0.5, -0.5, 0.6, -0.6, 0.7, -0.7, 0.8, -0.8] + [0.01] * 12
AFTER = [b + t for b, t in zip(BEFORE, STEP, strict=True)]


def plus(values: list[float], offsets: list[float] | float) -> list[float]:
    each = [offsets] * len(values) if isinstance(offsets, float) else offsets
    return [v + o for v, o in zip(values, each, strict=True)]


def test_an_engine_that_is_where_the_trainer_is_follows() -> None:
    found = judge_weights(BEFORE, AFTER, AFTER, engine_before=BEFORE)
    assert found.result is Result.FOLLOWS
    assert found.slope == pytest.approx(1)
    assert found.residual == pytest.approx(0)
    assert found.num_tokens == 20
    # sqrt(2 * (0.25 + 0.36 + 0.49 + 0.64) / 8)
    assert found.moved_rms == pytest.approx(math.sqrt(2 * 1.74 / 8))
    assert found.gap_rms == 0


def test_an_engine_that_stood_still_is_unchanged() -> None:
    found = judge_weights(BEFORE, AFTER, BEFORE, engine_before=BEFORE)
    assert found.result is Result.UNCHANGED
    assert found.slope == pytest.approx(0)
    assert found.residual == pytest.approx(1)
    assert "old weights" in found.reason
    assert not found.result.is_accepted


def test_half_of_the_change_is_neither() -> None:
    half = plus(BEFORE, [t / 2 for t in STEP])
    found = judge_weights(BEFORE, AFTER, half, engine_before=BEFORE)
    assert found.result is Result.OTHER
    assert found.slope == pytest.approx(0.5)
    assert found.residual == pytest.approx(0.5)


def test_other_weights_are_seen_even_where_the_moved_tokens_agree() -> None:
    other = AFTER[:8] + [-3.0] * 12
    found = judge_weights(BEFORE, AFTER, other, engine_before=BEFORE)
    assert found.result is Result.OTHER
    # sqrt(12 * (-3 + 0.99)^2 / 20)
    assert found.gap_rms == pytest.approx(2.01 * math.sqrt(12 / 20))


def test_a_version_that_follows_from_afar_is_accepted_and_the_distance_is_said() -> None:
    """As when a part of the weights was not renewed."""
    near = plus(BEFORE, [0.95 * t for t in STEP])
    found = judge_weights(BEFORE, AFTER, near, engine_before=BEFORE)
    assert found.result is Result.FOLLOWS
    # sqrt((0.05^2 * 2 * 1.74 + 12 * (0.05 * 0.01)^2) / 20)
    assert found.gap_rms == pytest.approx(0.0209, abs=1e-4)
    assert found.reason.endswith("but 0.021 away from it, where 0.0001 is usual")
    assert "away" not in judge_weights(BEFORE, AFTER, AFTER, engine_before=BEFORE).reason


def test_the_opposite_change_is_other_weights() -> None:
    found = judge_weights(BEFORE, AFTER, plus(BEFORE, [-t for t in STEP]), engine_before=BEFORE)
    assert found.result is Result.OTHER
    assert found.slope == pytest.approx(-1)


def test_a_constant_disagreement_of_engine_and_trainer_cancels() -> None:
    """bfloat16 engine, float32 trainer: 0.15 apart everywhere, and yet the change is the same."""
    found = judge_weights(BEFORE, AFTER, plus(AFTER, 0.15), engine_before=plus(BEFORE, 0.15))
    assert found.result is Result.FOLLOWS
    assert found.slope == pytest.approx(1)
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert found.resolution == pytest.approx(0.15)
    assert judge_weights(BEFORE, AFTER, plus(BEFORE, 0.15), engine_before=plus(BEFORE, 0.15)).result is (
        Result.UNCHANGED
    )


def test_a_step_below_the_engines_resolution_is_indistinguishable() -> None:
    tiny = plus(BEFORE, [t / 10 for t in STEP])
    wobble = [0.05 * (-1) ** i for i in range(20)]
    found = judge_weights(BEFORE, tiny, plus(BEFORE, wobble), engine_before=plus(BEFORE, wobble))
    assert found.result is Result.INDISTINGUISHABLE
    assert found.result.is_accepted
    assert found.resolution == pytest.approx(0.05)
    assert "indistinguishable" in found.reason


def test_a_step_of_nothing_is_indistinguishable_unless_the_engine_is_elsewhere() -> None:
    assert judge_weights(BEFORE, BEFORE, BEFORE, engine_before=BEFORE).result is Result.INDISTINGUISHABLE
    found = judge_weights(BEFORE, BEFORE, plus(BEFORE, 0.4), engine_before=BEFORE)
    assert found.result is Result.OTHER


def test_noise_between_two_scorings_widens_the_resolution() -> None:
    tiny = plus(BEFORE, [t / 100 for t in STEP])
    sure = judge_weights(BEFORE, tiny, BEFORE, engine_before=BEFORE, noise_rms=0.0)
    unsure = judge_weights(BEFORE, tiny, BEFORE, engine_before=BEFORE, noise_rms=0.01)
    assert sure.result is Result.UNCHANGED
    assert unsure.result is Result.INDISTINGUISHABLE


def test_a_rollback_is_judged_against_the_trainers_own_numbers() -> None:
    """The engine serves something newer; its own change has nothing to do with the step that is judged."""
    newer = plus(AFTER, [0.9 * (-1) ** i for i in range(20)])
    found = judge_weights(BEFORE, AFTER, AFTER, engine_before=newer, known_gap_rms=0.001)
    assert found.result is Result.FOLLOWS
    still = judge_weights(BEFORE, AFTER, newer, engine_before=newer, known_gap_rms=0.001)
    assert not still.result.is_accepted


def test_after_a_restart_there_is_no_before() -> None:
    assert judge_weights(BEFORE, AFTER, AFTER, known_gap_rms=0.001).result is Result.FOLLOWS
    assert judge_weights(BEFORE, AFTER, BEFORE, known_gap_rms=0.001).result is Result.UNCHANGED


def test_an_engine_without_numbers_is_rejected() -> None:
    broken = [math.nan, *AFTER[1:]]
    assert judge_weights(BEFORE, AFTER, broken, engine_before=BEFORE).result is Result.OTHER


logprob = st.floats(-8, 0)


@given(st.lists(st.tuples(logprob, logprob), min_size=8, max_size=60), st.floats(-0.05, 0.05))
def test_the_right_weights_are_always_accepted(pairs: list[tuple[float, float]], gap: float) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    found = judge_weights(before, after, plus(after, gap), engine_before=plus(before, gap))
    assert found.result.is_accepted


@given(st.lists(st.tuples(logprob, logprob), min_size=8, max_size=60))
def test_the_old_weights_are_never_said_to_follow(pairs: list[tuple[float, float]]) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    assert judge_weights(before, after, before, engine_before=before).result is not Result.FOLLOWS


OLD, NEW = {1: -1.0, 2: -2.0}, {1: -1.5, 2: -1.6}


def test_a_fresh_cache_answers_as_without_it() -> None:
    assert judge_cache([PrimedPrompt(OLD, NEW, NEW)], noise=0.0) == (Result.FOLLOWS, 0.0)


def test_a_stale_cache_shows() -> None:
    mixed = {1: -1.25, 2: -1.8}
    result, missed = judge_cache([PrimedPrompt(OLD, mixed, NEW)], noise=0.0)
    assert result is Result.STALE
    assert missed == pytest.approx(0.25)
    good = PrimedPrompt(OLD, NEW, NEW)
    assert judge_cache([good, PrimedPrompt(OLD, OLD, NEW)], noise=0.0)[0] is Result.STALE


def test_a_stale_cache_can_hide_in_noise_and_below_the_change() -> None:
    near = {1: -1.501, 2: -1.601}
    assert judge_cache([PrimedPrompt(OLD, near, NEW)], noise=0.001)[0] is Result.FOLLOWS
    assert judge_cache([PrimedPrompt(NEW, near, NEW)], noise=0.001)[0] is Result.INDISTINGUISHABLE


def test_answers_without_a_common_token_are_stale() -> None:
    assert judge_cache([PrimedPrompt(OLD, {7: -1.0}, NEW)], noise=0.0)[0] is Result.STALE


# --- back to a version that served before ---

# Step 3 moved one token much and the rest hardly: on the probe of version 2 it looks almost like version 2.
NEXT = plus(AFTER, [0.15] * 8 + [0.0] * 12)


def test_a_rollback_by_several_versions_is_judged_by_where_the_engine_is() -> None:
    found = judge_weights(BEFORE, AFTER, AFTER, engine_before=NEXT, known_gap_rms=0.0)
    assert found.result is Result.FOLLOWS


def test_an_engine_that_did_not_go_back_is_seen_although_the_two_versions_look_alike() -> None:
    found = judge_weights(BEFORE, AFTER, NEXT, engine_before=NEXT, known_gap_rms=0.0)
    assert found.result is Result.UNCHANGED
    assert "came no nearer" in found.reason
    # By where it is alone it would have passed: that is what the second look is for.
    assert judge_weights(BEFORE, AFTER, NEXT, known_gap_rms=0.0).result is Result.FOLLOWS


def test_two_versions_that_the_engine_cannot_tell_apart_are_no_reason_to_refuse_a_rollback() -> None:
    other = plus(AFTER, [0.0005] * 20)
    found = judge_weights(BEFORE, AFTER, other, engine_before=other, known_gap_rms=0.001)
    assert found.result is Result.FOLLOWS
