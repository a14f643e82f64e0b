"""The stated policies: missing rewards, failed episodes, unequal and silenced sources, agents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.episodes import call, choice, episode, group
from fakes.log_rows import reward

from lightning_rl.errors import SettingsError, UserError
from lightning_rl.records import EpisodeStatus, RewardTarget
from lightning_rl.settings.train import DryRunSettings, TrainSettings
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.plan import PlanSettings, plan_step
from lightning_rl.trainer.planning.planner import plan_settings
from lightning_rl.trainer.planning.selection import SelectionRules, judge_group
from lightning_rl.trainer.reasons import Reason, in_words


def said(name, *rows, status=EpisodeStatus.ENDED, calls=()):
    """An episode with rewards as (source, value)."""
    rewards = tuple(reward(name, value, source, id=f"{name}-{source}") for source, value in rows)
    steps = calls or [call(f"{name}-0", [1], [2])]
    return replace(episode(name, calls=steps, status=status), rewards=rewards)


def judge(*episodes, **rules):
    found = judge_group(group("g", episodes), SelectionRules("policy", **rules))
    return {judged.episode.id: judged.set_aside or judged.value for judged in found.episodes}


def test_unrewarded_episodes_follow_their_policy():
    silent = said("s")
    assert judge(silent, said("a", ("x", 1.0))) == {"s": Reason.UNREWARDED, "a": 1.0}
    assert judge(silent, said("a", ("x", 1.0)), unrewarded="fill=-0.5") == {"s": -0.5, "a": 1.0}
    with pytest.raises(UserError, match="episode s ended without a reward"):
        judge(silent, unrewarded="error")


def test_failed_episodes_follow_theirs():
    failed, silent = (
        said("f", ("x", 0.7), status=EpisodeStatus.FAILED),
        said("s", status=EpisodeStatus.FAILED),
    )
    assert judge(failed, silent) == {"f": Reason.FAILED, "s": Reason.FAILED}
    assert judge(failed, silent, failed="fill=0") == {"f": 0.0, "s": 0.0}
    assert judge(failed, silent, failed="as_rewarded") == {"f": 0.7, "s": Reason.UNREWARDED}
    assert judge(replace(failed, has_gap=True), failed="fill=0") == {"f": Reason.GAP}
    excluded = replace(failed, status=EpisodeStatus.EXCLUDED)
    assert judge(excluded, failed="fill=0") == {"f": Reason.EXCLUDED}


BOTH = [said(name, ("judge", value), ("tests", 1.0)) for name, value in (("a", 1.0), ("b", 0.0))]


def test_a_source_that_is_missing_for_one_sibling_creates_no_advantage():
    odd = said("odd", ("tests", 1.0))
    assert judge(*BOTH, odd) == {"a": 1.0, "b": 0.5, "odd": Reason.UNEQUAL_SOURCES}
    assert judge(*BOTH, odd, unequal_sources="common") == {"a": 1.0, "b": 1.0, "odd": 1.0}
    assert judge(*BOTH, said("odd", ("human", 1.0)), unequal_sources="common")["odd"] == (
        Reason.UNEQUAL_SOURCES  # nothing in common: as if it were set_aside
    )
    # of two sets that are as frequent, the one with more sources stands
    assert judge(BOTH[0], odd) == {"a": 1.0, "odd": Reason.UNEQUAL_SOURCES}


def test_filled_values_have_no_source_to_differ_in():
    failed = said("f", status=EpisodeStatus.FAILED)
    assert judge(*BOTH, failed, said("s"), failed="fill=0", unrewarded="fill=-1") == {
        "a": 1.0,
        "b": 0.5,
        "f": 0.0,
        "s": -1.0,
    }


def test_sources_weigh_what_is_stated():
    both = said("a", ("judge", 0.0), ("human", 1.0))
    assert judge(both, source_weights={"human": 3.0}) == {"a": 0.75}
    assert judge(both, source_weights={"human": 0.0}) == {"a": 0.0}
    # a silenced source is none, so it makes no difference between siblings either
    assert judge(both, said("b", ("judge", 1.0)), source_weights={"human": 0}) == {"a": 0.0, "b": 1.0}
    assert judge(both, source_weights={"human": 0, "judge": 0}) == {"a": Reason.UNREWARDED}


def part(target, value, source="judge", **about):
    return reward("a", value, source, target=target, **about)


def test_parts_of_an_episode():
    two = call("c1", [1], [2], choices=(choice("c1", [2, 3]), choice("c1", [4], index=1, used=True)))
    rows = (
        part(RewardTarget.CALL, 0.5, call_id="c0"),
        part(RewardTarget.TOKENS, 0.25, call_id="c0", choice_index=0, token_start=0, token_end=1),
        part(RewardTarget.CALL, 1.0, "tests", call_id="c1", choice_index=1),
        part(RewardTarget.CALL, 9.0, "human", call_id="c1", choice_index=0),  # of an answer that was not used
        part(RewardTarget.AGENT, 2.0, agent="writer"),
    )
    one = replace(episode("a", 1.0, calls=[call("c0", [1], [2]), two]), rewards=rows)
    (judged,) = judge_group(group("g", [one]), SelectionRules("policy", unrewarded="fill=0")).episodes
    assert judged.parts.calls == {"c0": 0.75, "c1": 1.0}
    assert judged.parts.call_sources == {"judge", "tests"}
    assert judged.parts.agents == {"writer": 2.0}
    assert judged.parts.agent_sources == {"writer": {"judge"}}
    assert len(judged.parts.reward_ids) == 4
    assert judged.reward_ids == ()


def test_rewards_of_calls_reach_the_manifest_with_their_rows():
    rows = (reward("a", 1.0, id="whole"), part(RewardTarget.CALL, 0.5, call_id="a0", id="half"))
    first = replace(episode("a", calls=[call("a0", [1], [2]), call("a1", [1], [2])]), rewards=rows)
    rows = (reward("b", 0.0), part(RewardTarget.CALL, 0.0, call_id="b0"))
    second = replace(episode("b", calls=[call("b0", [1], [2]), call("b1", [1], [2])]), rewards=rows)

    def plan(credit):
        settings = PlanSettings(SelectionRules("policy"), configure(credit))
        groups = [group("g", [first, second])]
        return plan_step(groups, settings, run_id="r", step=0, from_version=0).manifest

    found = plan("intermediate std=none")
    assert [row.advantage for row in found.choices] == [0.75, 0.5, -0.75, -0.5]
    assert found.reward_ids["a"] == ("whole", "half")
    assert plan("dr_grpo").reward_ids["a"] == ("whole",)


def test_only_the_named_agents_are_trained_and_the_others_keep_their_place():
    def played(name, value):
        calls = [call(f"{name}0", [1], [2], agent="planner"), call(f"{name}1", [1], [2], agent="writer")]
        return episode(name, value, calls=calls)

    rules = SelectionRules("policy", train_agents=frozenset({"planner"}))
    settings = PlanSettings(rules, configure("turn_discount gamma=0.5 std=none"))
    groups = [group("g", [played("a", 1.0), played("b", 0.0)])]
    found = plan_step(groups, settings, run_id="r", step=0, from_version=0)
    rows = {row.call_id: row for row in found.manifest.choices}
    assert rows["a0"].advantage == 0.25  # one call before the last, though the last is not trained
    assert (rows["a1"].advantage, rows["a1"].reason) == (None, "other_agent")
    assert rows["a1"].multiplier == 0.0
    assert found.counts.choices_excluded == {"other_agent": 2}


def test_settings_become_rules(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text(
        'unrewarded = "fill=0"\nfailed = "as_rewarded"\ntrain_agents = ["planner"]\nconstant_tokens = 9\n'
        "[sources]\nhuman = 2.0\n"
        '[credit]\nrule = "gigpo"\nomega = 0.5\n[credit.agents.writer]\nrule = "rloo"\n'
    )
    planned = plan_settings(DryRunSettings.load(file))
    assert planned.selection == SelectionRules(
        "policy", "fill=0", None, "as_rewarded", "set_aside", {"human": 2.0}, frozenset({"planner"})
    )
    assert planned.credit == configure({"rule": "gigpo", "omega": 0.5, "agents": {"writer": "rloo"}})
    assert planned.constant_tokens == 9
    # a flag names another rule: the file's options were the other rule's
    assert plan_settings(DryRunSettings.load(file, credit="rloo")).credit == configure("rloo")


def test_the_environment_names_a_rule(monkeypatch):
    monkeypatch.setenv("LIGHTNING_TRAIN_CREDIT", "gigpo omega=2")
    assert plan_settings(DryRunSettings.load()).credit == configure("gigpo omega=2")
    monkeypatch.setenv("LIGHTNING_TRAIN_CREDIT", '{"rule": "rloo"}')
    assert plan_settings(DryRunSettings.load()).credit == configure("rloo")


@pytest.mark.parametrize(
    "wrong",
    [
        {"unrewarded": "fill"},
        {"unrewarded": "fill=x"},
        {"failed": "error"},
        {"sources": {"human": -1.0}},
        {"unequal_sources": "ignore"},
        {"constant_tokens": 0},
    ],
)
def test_wrong_policies_are_refused(wrong, tmp_path):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        TrainSettings.load(model=tmp_path, **wrong)


def test_every_reason_has_words():
    assert all(in_words(reason) != reason for reason in Reason)
    assert in_words("a_plugins_own") == "a_plugins_own"
