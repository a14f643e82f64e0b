"""From groups to the manifest: who is trained, who is not and why, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from fakes.episodes import call, choice, episode, group

from lightning_rl.errors import UserError
from lightning_rl.records import CallKind, EpisodeStatus, Purpose, Quarantine
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.plan import PlanSettings, plan_step, transitions
from lightning_rl.trainer.planning.selection import SelectionRules
from lightning_rl.trainer.reasons import Reason


def plan(
    groups,
    *,
    from_version=0,
    unrewarded="skip",
    max_staleness=None,
    weighting="episode",
    credit="dr_grpo",
    **more,
):
    rules = SelectionRules("policy", unrewarded, max_staleness, **more)
    settings = PlanSettings(rules, configure(credit), weighting)
    return plan_step(groups, settings, run_id="run", step=3, from_version=from_version)


def one(reward, name, *calls, **changes):
    return episode(name, reward, calls=calls or [call(f"{name}-0", [1, 2], [3, 4])], **changes)


def reasons(planned):
    return {row.call_id: row.reason for row in planned.manifest.choices}


def test_a_step_by_hand():
    good = one(1.0, "a", call("a0", [1], [2, 3]), call("a1", [1, 2], [4]))
    bad = one(0.0, "b", call("b0", [1], [5]))
    planned = plan([group("g", [good, bad])], from_version=7)
    rows = {row.call_id: row for row in planned.manifest.choices}
    assert [rows[name].advantage for name in ("a0", "a1", "b0")] == [0.5, 0.5, -0.5]
    assert [rows[name].multiplier for name in ("a0", "a1", "b0")] == pytest.approx([1 / 6, 1 / 6, 1 / 2])
    assert planned.manifest.step == 3
    assert planned.manifest.from_version == 7
    assert planned.manifest.returns == {"a": 1.0, "b": 0.0}
    assert planned.manifest.reward_ids == {"a": ("r-a",), "b": ("r-b",)}
    counts = planned.counts
    assert (counts.episodes_trained, counts.choices_trained, counts.trained_tokens) == (2, 3, 4)
    assert counts.call_tokens == 3 + 3 + 2
    assert counts.reward_mean == 0.5
    assert planned.trains


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": CallKind.SIDE}, "side_call"),
        ({"kind": CallKind.JUDGE}, "judge_call"),
        ({"kind": CallKind.RETRY_ORPHAN}, "retry_orphan_call"),
        ({"policy": "another"}, "other_policy"),
        ({"policy": None}, "other_policy"),
        ({"prompt_ids": call("x", [], []).prompt_ids}, "no_prompt_ids"),
        ({"choices": (choice("odd", [2], quarantine=Quarantine.PENALTIES),)}, "penalties"),
        ({"choices": (choice("odd", [2], used=False),)}, "not_used"),
        ({"choices": (choice("odd", []),)}, "no_completion_ids"),
        ({"choices": (choice("odd", [2, 3], behavior=[-1.0]),)}, "misaligned"),
        ({"sampling": {"temperature": 0}}, "temperature_zero"),
    ],
)
def test_an_excluded_call_loses_only_its_loss(changes, reason):
    odd = replace(call("odd", [1], [2]), **changes)
    groups = [group("g", [one(1.0, "a", odd, call("a1", [1], [3])), one(0.0, "b")])]
    planned = plan(groups)
    rows = {row.call_id: row for row in planned.manifest.choices}
    assert rows["odd"].advantage is None
    assert rows["odd"].multiplier == 0.0
    assert rows["odd"].reason == reason
    assert rows["a1"].advantage == 0.5
    assert rows["b-0"].advantage == -0.5
    assert planned.counts.choices_excluded == {reason: 1}
    assert "odd" not in {t.call_id for t in transitions(planned.manifest, groups)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"purpose": Purpose.EVAL}, "evaluation"),
        ({"status": EpisodeStatus.FAILED}, "failed"),
        ({"status": EpisodeStatus.EXCLUDED}, "excluded"),
        ({"status": EpisodeStatus.RUNNING}, "running"),
        ({"has_gap": True}, "gap"),
        ({"rewards": ()}, "unrewarded"),
    ],
)
def test_an_episode_that_is_set_aside_is_counted_and_moves_no_baseline(changes, reason):
    odd = replace(one(1.0, "odd"), **changes)
    planned = plan([group("g", [odd, one(1.0, "a"), one(0.0, "b")])])
    assert planned.counts.episodes_excluded == {reason: 1}
    assert reasons(planned) == {"odd-0": reason, "a-0": None, "b-0": None}
    assert {row.advantage for row in planned.manifest.choices} == {None, 0.5, -0.5}


def test_a_missing_reward_can_be_an_error():
    with pytest.raises(UserError, match=r"episode a ended without a reward.*lightning reward a VALUE"):
        plan([group("g", [one(None, "a"), one(0.0, "b")])], unrewarded="error")


def test_where_one_choice_is_named_as_used_the_others_are_not():
    n2 = call("n2", [1], [2], choices=(choice("n2", [2]), choice("n2", [3], index=1, used=True)))
    planned = plan([group("g", [one(1.0, "a", n2), one(0.0, "b")])])
    found = {(row.call_id, row.choice_index): row.reason for row in planned.manifest.choices}
    assert found["n2", 0] == Reason.NOT_USED
    assert found["n2", 1] is None


def test_staleness_is_counted_in_versions():
    old, new = call("old", [1], [2], policy_version=2), call("new", [1], [3], policy_version=4)
    unknown = call("unknown", [1], [4], policy_version=None)
    groups = [
        group("g", [one(1.0, "a", old, new, unknown), one(0.0, "b", call("b0", [1], [5], policy_version=3))])
    ]
    assert reasons(plan(groups, from_version=4, max_staleness=1)) == {
        "old": "stale",
        "new": None,
        "unknown": "stale",
        "b0": None,
    }
    assert set(reasons(plan(groups, from_version=4)).values()) == {None}


def test_groups_without_variance_say_the_cause_and_give_their_weight_to_the_others():
    solved = group("s", [one(1.0, "s1"), one(1.0, "s2")])
    failed = group("f", [one(0.0, "f1"), one(0.0, "f2"), one(0.0, "f3")])
    varied = group("v", [one(1.0, "v1"), one(0.0, "v2")])
    planned = plan([solved, failed, varied])
    assert planned.counts.episodes_excluded == {"no_variance:all_failed": 3, "no_variance:all_solved": 2}
    assert (planned.counts.groups, planned.counts.groups_trained) == (3, 1)
    trained = [row for row in planned.manifest.choices if row.advantage is not None]
    assert [row.multiplier for row in trained] == [0.25, 0.25]  # two trained episodes of two tokens
    assert planned.counts.reward_mean == pytest.approx(3 / 7)
    none = plan([solved, failed])
    assert not none.trains
    assert none.counts.why_nothing() == (
        "no group has variance (every episode failed in most: "
        "3 no_variance:all_failed, 2 no_variance:all_solved); "
        "take harder, easier or more varied tasks, or more episodes of each"
    )
    assert set(none.manifest.reward_ids) == {"s1", "s2", "f1", "f2", "f3"}  # used up all the same


def test_an_episode_of_excluded_calls_still_counts_in_the_baseline():
    side = one(1.0, "a", call("a0", [1], [2], kind=CallKind.SIDE))
    planned = plan([group("g", [side, one(0.0, "b")])])
    assert planned.counts.episodes_excluded == {"no_trainable_choice": 1}
    assert reasons(planned) == {"a0": "side_call", "b-0": None}
    assert planned.manifest.choices[1].advantage == -0.5


def test_why_nothing_names_the_choices_reason():
    cold = [one(float(i), f"e{i}", call(f"c{i}", [1], [2], sampling={"temperature": 0})) for i in range(2)]
    counts = plan([group("g", cold)]).counts
    assert "2 temperature_zero" in counts.why_nothing()


def test_transitions_carry_tokens_and_temperature():
    warm = call("w", [1, 2], [3], sampling={"temperature": 0.5})
    groups = [group("g", [one(1.0, "a", warm), one(0.0, "b")])]
    found = {t.call_id: t for t in transitions(plan(groups).manifest, groups)}
    assert found["w"].temperature == 0.5
    assert found["b-0"].temperature == 1.0
    assert list(found["w"].prompt_ids) == [1, 2]
    assert list(found["w"].completion_ids) == [3]
    assert found["w"].advantage == 0.5


def test_describe_is_one_line():
    counts = plan([group("g", [one(1.0, "a"), one(0.0, "b"), one(None, "c")])]).counts
    assert counts.describe() == "1/1 groups, episodes 2/3 (1 unrewarded), choices 2/3 (1 unrewarded)"


def test_planning_needs_no_torch():
    program = (
        "import sys; import lightning_rl.trainer.report;"
        "import lightning_rl.trainer.planning.plan, lightning_rl.trainer.planning.source;"
        "bad = {'torch', 'transformers', 'trl', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
