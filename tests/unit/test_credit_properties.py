"""What every credit rule has to keep, whatever the rewards."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from fakes.episodes import call, choice, played
from fakes.episodes import group as group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.records import CallKind, EpisodeStatus, Quarantine, Reward, RewardTarget
from lightning_rl.trainer.credit.base import CreditContext, JudgedEpisode, JudgedGroup, PastEpisode
from lightning_rl.trainer.credit.registry import RULES, configure
from lightning_rl.trainer.planning.plan import PlanSettings, plan_step
from lightning_rl.trainer.planning.selection import SelectionRules
from lightning_rl.trainer.reasons import Reason

OF_CALLS = ("gigpo", "hgpo", "step_gae", "intermediate")
COMPARES_ELSEWHERE = ("reinforce_pp", "running_baseline", "step_gae")  # with the batch, the past, a critic
BOUNDED = ("sr_ppo",)  # takes probabilities and outcomes between 0 and 1: test_ppo.py
SETTINGS = [
    *sorted(RULES.keys() - set(BOUNDED)),
    "gigpo state=tokens",
    "hgpo episode_weight=0.5",
    "intermediate compare=group",
]

rule_settings = st.sampled_from(SETTINGS)
numbers = st.sampled_from([0.0, 1.0, 0.5, -1.0]) | st.floats(-5, 5)


@st.composite
def episodes(draw: Any, name: str) -> JudgedEpisode:
    num_steps = draw(st.integers(1, 4))
    states = draw(st.lists(st.sampled_from("xyz"), min_size=num_steps, max_size=num_steps))
    agents = draw(st.lists(st.sampled_from(["p", "w"]), min_size=num_steps, max_size=num_steps))
    rewards = draw(st.dictionaries(st.integers(0, num_steps - 1), numbers, max_size=2))
    set_aside = draw(st.sampled_from([None, None, None, "failed"]))
    return played(
        name,
        draw(numbers),
        states,
        agents=agents,
        rewards=rewards,
        sources=["judge"],
        set_aside=set_aside,
        ended_at_ms=draw(st.integers(0, 3)),
    )


@st.composite
def steps(draw: Any) -> list[JudgedGroup]:
    groups = []
    for g in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        groups.append(JudgedGroup(f"g{g}", f"t{g}", tuple(draw(episodes(f"e{g}{i}")) for i in range(size))))
    return groups


def context_of(groups: list[JudgedGroup]) -> CreditContext:
    """Values for every call by its name, and a past in which the step's own episodes are."""
    draw = random.Random(0)
    values = {f"e{g}{i}-c{k}": draw.uniform(-1, 1) for g in range(3) for i in range(4) for k in range(4)}
    past = [PastEpisode(f"p{i}", "t0", {}, i, draw.random()) for i in range(5)]
    own = [
        PastEpisode(e.episode.id, g.task_id, {}, e.episode.ended_at_ms or 0, e.value or 0.0)
        for g in groups
        for e in g.episodes
    ]
    return CreditContext(values, [*past, *own])


def credits(setting: str, groups: list[JudgedGroup]) -> dict[Any, Any]:
    return configure(setting).assign(groups, context_of(groups))


@settings(max_examples=60)
@given(rule_settings, steps())
def test_every_step_gets_a_finite_number_or_a_reason(setting, groups):
    found = credits(setting, groups)
    for group in groups:
        for judged in group.episodes:
            for step in judged.steps():
                credit = found[step.id, 0]
                assert (credit.advantage is None) == (credit.reason is not None)
                assert credit.advantage is None or math.isfinite(credit.advantage)
                if judged.set_aside is not None:
                    assert credit.reason == judged.set_aside


@settings(max_examples=60)
@given(rule_settings, steps(), st.randoms(use_true_random=False))
def test_the_order_of_reading_changes_not_a_digit(setting, groups, shuffler):
    shuffled = []
    for group in groups:
        members = [
            replace(judged, episode=replace(judged.episode, calls=_shuffled(judged.episode.calls, shuffler)))
            for judged in group.episodes
        ]
        shuffled.append(replace(group, episodes=_shuffled(members, shuffler)))
    shuffler.shuffle(shuffled)
    assert credits(setting, groups) == credits(setting, shuffled)


def _shuffled(items: Any, shuffler: random.Random) -> tuple[Any, ...]:
    listed = list(items)
    shuffler.shuffle(listed)
    return tuple(listed)


@settings(max_examples=60)
@given(
    rule_settings,
    steps(),
    st.sampled_from([CallKind.SIDE, CallKind.JUDGE, CallKind.RETRY_ORPHAN]),
    st.data(),
)
def test_a_retry_a_side_call_or_a_judge_moves_nobody(setting, groups, kind, data):
    group = data.draw(st.sampled_from(groups))
    judged = data.draw(st.sampled_from(group.episodes))
    where = data.draw(st.integers(0, len(judged.episode.calls)))
    odd = call("odd", [1], [2], kind=kind, agent="p", state_key="x", episode_id=judged.episode.id)
    calls = [*judged.episode.calls[:where], odd, *judged.episode.calls[where:]]
    longer = replace(
        judged,
        episode=replace(judged.episode, calls=tuple(replace(c, ordinal=i) for i, c in enumerate(calls))),
    )
    changed = [replace(g, episodes=tuple(longer if e is judged else e for e in g.episodes)) for g in groups]
    before, after = credits(setting, groups), credits(setting, changed)
    assert {key: credit for key, credit in after.items() if key[0] != "odd"} == before


@settings(max_examples=60)
@given(rule_settings, steps())
def test_an_episode_that_is_set_aside_is_as_good_as_absent(setting, groups):
    without = [replace(g, episodes=g.present()) for g in groups]
    found, alone = credits(setting, groups), configure(setting).assign(without, context_of(groups))
    assert all(found[key] == credit for key, credit in alone.items())
    assert all(found[key].advantage is None for key in found.keys() - alone.keys())


@settings(max_examples=60)
@given(rule_settings, steps(), st.data())
def test_how_many_answers_a_call_has_changes_nothing(setting, groups, data):
    group = data.draw(st.sampled_from(groups))
    judged = data.draw(st.sampled_from(group.episodes))
    calls = tuple(replace(c, choices=(*c.choices, choice(c.id, [5], index=1))) for c in judged.episode.calls)
    wider = replace(judged, episode=replace(judged.episode, calls=calls))
    changed = [replace(g, episodes=tuple(wider if e is judged else e for e in g.episodes)) for g in groups]
    before, after = credits(setting, groups), credits(setting, changed)
    assert {key: credit for key, credit in after.items() if key[1] == 0} == before
    assert all(after[name, 1] == after[name, 0] for name in (c.id for c in calls))


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.split()[0] not in COMPARES_ELSEWHERE])
def test_a_lone_survivor_gets_no_made_up_advantage(setting):
    others = [played(f"e0{i}", 0.0, "xy", agents="pw", set_aside="failed") for i in (1, 2)]
    found = credits(setting, [JudgedGroup("g", "t", (played("e00", 1.0, "xy", agents="pw"), *others))])
    assert {(c.advantage, c.reason) for (name, _), c in found.items() if name.startswith("e00")} == {
        (None, Reason.LONE_SURVIVOR)
    }


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.split()[0] not in COMPARES_ELSEWHERE])
@pytest.mark.parametrize(("value", "reason"), [(1.0, Reason.ALL_SOLVED), (0.0, Reason.ALL_FAILED)])
def test_a_group_without_variance_gets_none_with_the_cause(setting, value, reason):
    group = JudgedGroup("g", "t", tuple(played(f"e0{i}", value, "xy", agents="pw") for i in range(3)))
    found = {(c.advantage, c.reason) for c in credits(setting, [group]).values()}
    by_position = setting == "intermediate"
    assert found == {(None, Reason.EQUAL_ADVANTAGES if by_position else reason)}


@pytest.mark.parametrize("name", OF_CALLS)
def test_calls_that_a_source_never_looked_at_create_no_advantage(name):
    judged = [played(f"e0{i}", float(i), "xy", rewards={0: 0.5}) for i in range(3)]
    silent = played("e03", 1.0, "xy")
    found = credits(name, [JudgedGroup("g", "t", (*judged, silent))])
    alone = credits(name, [JudgedGroup("g", "t", tuple(judged))])
    assert all(found[key] == credit for key, credit in alone.items())
    assert {found[f"e03-c{k}", 0].reason for k in (0, 1)} == {Reason.UNEQUAL_SOURCES}
    lenient = credits(f"{name} call_sources=any", [JudgedGroup("g", "t", (*judged, silent))])
    assert lenient["e03-c1", 0].reason != Reason.UNEQUAL_SOURCES


@given(st.lists(numbers, min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_zero_and_have_unit_deviation(values):
    group = JudgedGroup("g", "t", tuple(played(f"e0{i}", value) for i, value in enumerate(values)))
    found = [credit.advantage for credit in credits("grpo", [group]).values()]
    if None in found:
        assert set(found) == {None}
        return
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    assert math.fsum(a * a for a in found) == pytest.approx(len(values) - 1, rel=1e-6)


@given(st.lists(numbers, min_size=2, max_size=6), st.integers(2, 6), st.integers(0, 5))
def test_more_calls_weigh_an_episode_no_more(values, extra, who):
    def play(longer: bool) -> dict[Any, Any]:
        members = [
            played(f"e0{i}", value, "x" * (extra if longer and i == who % len(values) else 1))
            for i, value in enumerate(values)
        ]
        return credits("grpo", [JudgedGroup("g", "t", tuple(members))])

    short, long = play(False), play(True)
    assert all(long[key] == credit for key, credit in short.items())


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=2, max_size=4))
def test_with_lambda_one_and_no_discount_gae_is_return_minus_value(rewards):
    members = tuple(
        played(f"e0{i}", 0.0, "x" * len(r), rewards=dict(enumerate(r))) for i, r in enumerate(rewards)
    )
    groups = [JudgedGroup("g", "t", members)]
    found = credits("step_gae gamma=1 lam=1 whiten=none", groups)
    values = context_of(groups).values
    for i, given_rewards in enumerate(rewards):
        for k in range(len(given_rewards)):
            name = f"e0{i}-c{k}"
            expected = math.fsum(given_rewards[k:]) - values.get(name)
            assert found[name, 0].advantage == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60)
@given(rule_settings, steps(), st.data())
def test_an_excluded_call_keeps_its_place_and_loses_only_its_loss(setting, groups, data):
    """Through the whole plan: masked calls are None with their reason, all others are to the digit what they
    were."""

    def logged(judged: JudgedEpisode) -> Any:
        name_of = judged.episode.id
        rewards = [Reward(f"r-{name_of}", name_of, RewardTarget.EPISODE, judged.value or 0.0, "x", 0)]
        rewards += [
            Reward(f"r-{name}", name_of, RewardTarget.CALL, value, "judge", 0, call_id=name)
            for name, value in judged.parts.calls.items()
        ]
        status = EpisodeStatus.FAILED if judged.set_aside else EpisodeStatus.ENDED
        return replace(judged.episode, rewards=tuple(rewards), status=status)

    def plan(masked: set[str]) -> dict[str, Any]:
        made = []
        for g in groups:
            members = []
            for judged in g.episodes:
                calls = tuple(
                    replace(c, choices=(choice(c.id, [2], quarantine=Quarantine.PENALTIES),))
                    if c.id in masked
                    else c
                    for c in judged.episode.calls
                )
                members.append(replace(logged(judged), calls=calls))
            made.append(group_of(g.id, members))
        rules = PlanSettings(SelectionRules("policy"), configure(setting))
        context = context_of(groups)
        found = plan_step(made, rules, run_id="r", step=0, from_version=0, context=context)
        return {row.call_id: row for row in found.manifest.choices}

    names = [c.id for g in groups for e in g.episodes for c in e.episode.calls]
    masked = set(data.draw(st.lists(st.sampled_from(names), max_size=3)))
    before, after = plan(set()), plan(masked)
    for name, row in after.items():
        if name in masked:
            assert (row.advantage, row.multiplier, row.reason) == (None, 0.0, "penalties")
        else:
            assert (row.advantage, row.reason) == (before[name].advantage, before[name].reason)
