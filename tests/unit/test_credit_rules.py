"""Every credit rule against numbers computed by hand."""

from __future__ import annotations

import pytest
from fakes.episodes import judged, judged_group, played

from lightning_rl.errors import UserError
from lightning_rl.trainer.credit.base import CreditContext, JudgedGroup, PastEpisode
from lightning_rl.trainer.credit.compare import why_no_comparison
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.credit.step_gae import StepGaeOptions, value_targets
from lightning_rl.trainer.reasons import Reason


def advantages(setting, *groups: JudgedGroup, context: CreditContext | None = None) -> dict[str, object]:
    """Call id -> advantage, or the reason why there is none."""
    credits = configure(setting).assign(groups, context or CreditContext())
    return {
        name: credit.reason if credit.advantage is None else credit.advantage
        for (name, index), credit in credits.items()
        if index == 0
    }


def approx(**expected: float | str) -> dict[str, object]:
    return {
        name.replace("_", "-"): value if isinstance(value, str) else pytest.approx(value, abs=1e-6)
        for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        # 1 0 0 1: mean 1/2; sample variance (4 * 1/4) / 3 = 1/3, deviation 0.57735; population deviation 1/2
        ("lightning", 0.8660254),
        ("grpo", 0.8660254),
        ("grpo std=population", 1.0),
        ("grpo std=none eps=5", 0.5),
        ("grpo eps=0.1", 0.5 / (0.5773503 + 0.1)),
        ("dr_grpo", 0.5),
        ("rloo", 1 - (0 + 0 + 1) / 3),
        ("maxrl", 1.0),
        ("turn_discount", 0.8660254),
        ("reinforce_pp", 0.8660254),
        ("reinforce_pp_baseline", 0.8660254),
        ("intermediate", 0.8660254),
        ("intermediate compare=group std=population", 1.0),
        ("dr_mas", 0.8660254),
    ],
)
def test_four_episodes_of_one_call(rule, good):
    found = advantages(rule, judged([1.0, 0.0, 0.0, 1.0]))
    assert found == approx(e0_c0=good, e1_c0=-good, e2_c0=-good, e3_c0=good)


def test_maxrl_weighs_rare_successes_more():
    found = advantages("maxrl", judged([1.0, 0.0, 0.0, 0.0]))  # mean 1/4
    assert found == approx(e0_c0=3.0, e1_c0=-1.0, e2_c0=-1.0, e3_c0=-1.0)
    assert set(advantages("maxrl", judged([-1.0, 1.0])).values()) == {Reason.MEAN_NOT_POSITIVE}


def test_the_baseline_counts_episodes_not_calls():
    # e0 made 5 calls. Over calls the mean would be 5/6; over episodes it is 1/2.
    found = advantages("dr_grpo", judged([1.0, 0.0], calls=[5, 1]))
    assert [found[f"e0-c{k}"] for k in range(5)] == [0.5] * 5
    assert found["e1-c0"] == -0.5


def test_turn_discount_counts_back_from_the_last_call():
    found = advantages("turn_discount gamma=0.5 std=none", judged([1.0, 0.0], calls=[3, 1]))
    assert found == approx(e0_c0=0.125, e0_c1=0.25, e0_c2=0.5, e1_c0=-0.5)


def test_reinforce_pp_compares_over_the_whole_step():
    g, h = judged_group(played("a", 1.0), played("b", 0.0)), judged_group(played("c", 1.0), played("d", 1.0))
    # 1 0 1 1: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4
    assert advantages("reinforce_pp", g, h) == approx(a_c0=0.5, b_c0=-1.5, c_c0=0.5, d_c0=0.5)


def test_reinforce_pp_discounts_and_counts_each_episode_once():
    group = judged_group(played("a", 1.0, "xy"), played("b", 0.0))
    # G: a 1/2 1, b 0. mean (3/4 + 0) / 2 = 0.375; variance (0.125^2 + 0.625^2) / 2 + 0.375^2 = 0.34375
    found = advantages("reinforce_pp gamma=0.5", group)
    assert found == approx(a_c0=0.2132007, a_c1=1.0660036, b_c0=-0.6396021)


def test_reinforce_pp_with_baseline_scales_over_the_step():
    g = judged_group(played("a", 1.0), played("b", 0.0), name="g")
    h = judged_group(played("c", 1.0), played("d", 1.0), name="h")
    k = judged_group(played("e", 3.0), played("f", 0.0), played("i", 0.0), name="k")
    # D: 1/2 -1/2 | none | 2 -1 -1; squares 6.5 over 5 - 1 = 1.625, deviation 1.2747549
    found = advantages("reinforce_pp_baseline", g, h, k)
    solved = Reason.ALL_SOLVED
    assert found == approx(
        a_c0=0.3922323,
        b_c0=-0.3922323,
        c_c0=solved,
        d_c0=solved,
        e_c0=1.5689291,
        f_c0=-0.7844645,
        i_c0=-0.7844645,
    )


HISTORY = [PastEpisode(f"p{i}", "t", {"env": "x"}, i, value) for i, value in ((1, 1.0), (2, 0.0), (3, 1.0))]


def test_the_running_baseline_is_what_ended_before():
    rule = "running_baseline decay=0.5 min_history=3"
    alone = judged_group(played("a", 1.0, ended_at_ms=4, tags={"env": "x"}))
    itself_and_later = [PastEpisode("a", "t", {"env": "x"}, 4, 1.0), PastEpisode("z", "t", {}, 9, -7.0)]
    context = CreditContext(history=[*reversed(HISTORY), *itself_and_later])
    # (1/4 * 1 + 1/2 * 0 + 1 * 1) / (1/4 + 1/2 + 1) = 1.25 / 1.75
    expected = approx(a_c0=1 - 1.25 / 1.75)
    assert advantages(rule, alone, context=context) == expected
    assert advantages(rule + " key=tag:env", alone, context=context) == expected
    assert advantages(rule + " key=task", alone, context=context) == {"a-c0": Reason.NO_BASELINE_YET}
    few = "running_baseline decay=0.5 min_history=4"
    assert advantages(few, alone, context=context) == {"a-c0": Reason.NO_BASELINE_YET}


def test_gigpo_adds_a_comparison_within_the_state():
    group = judged_group(played("a", 1.0, ["s0", "s1"]), played("b", 0.0, ["s0", "s2"]))
    # A^E +-1/2; G: a 1/2 1, b 0 0; in s0: 1/2 and 0, so +-1/4
    found = advantages("gigpo gamma=0.5 std=none", group)
    assert found == approx(a_c0=0.75, a_c1=0.5, b_c0=-0.75, b_c1=-0.5)
    half = advantages("gigpo gamma=0.5 std=none omega=0.5", group)
    assert half == approx(a_c0=0.625, a_c1=0.5, b_c0=-0.625, b_c1=-0.5)
    # with sample deviations both are 1/sqrt(2)
    scaled = advantages("gigpo gamma=0.5", group)
    assert scaled == approx(a_c0=1.4142136, a_c1=0.7071068, b_c0=-1.4142136, b_c1=-0.7071068)


def test_gigpo_prefers_the_shorter_way_where_all_are_solved():
    group = judged_group(played("a", 1.0, ["s0"]), played("b", 1.0, ["s0", "s1"]))
    found = advantages("gigpo gamma=0.5 std=none", group)
    assert found == approx(a_c0=0.25, b_c0=-0.25, b_c1=Reason.ALL_SOLVED)


def test_a_loop_within_one_episode_compares_nothing():
    group = judged_group(played("a", 1.0, ["s", "s"]), played("b", 0.0, ["t"]))
    assert advantages("gigpo gamma=0.5 std=none", group) == approx(a_c0=0.5, a_c1=0.5, b_c0=-0.5)


def test_two_roles_in_one_state_are_not_compared():
    group = judged_group(played("a", 1.0, ["s"], agents=["p"]), played("b", 0.0, ["s"], agents=["w"]))
    assert advantages("gigpo std=none", group) == approx(a_c0=0.5, b_c0=-0.5)


def test_gigpo_takes_rewards_of_calls():
    group = judged_group(
        played("a", 0.0, ["s", "t"], rewards={0: 1.0}), played("b", 0.0, ["s", "t"], rewards={1: 1.0})
    )
    # T equal: A^E 0. G: a 1 0, b 1/2 1. s: 1 and 1/2; t: 0 and 1
    found = advantages("gigpo gamma=0.5 std=none", group)
    assert found == approx(a_c0=0.25, a_c1=-0.5, b_c0=-0.25, b_c1=0.5)
    ignored = advantages("gigpo call_rewards=false", group)
    assert set(ignored.values()) == {Reason.ALL_FAILED}


HGPO = (
    played("a", 1.0, ["a", "b", "c"]),  # G 1/4 1/2 1
    played("b", 0.0, ["a", "b", "d"]),
    played("c", 0.0, ["x", "b", "c"]),
)


def test_hgpo_weighs_groups_by_how_much_past_they_share():
    # depth 0: a +-1/8; b 1/2 0 0 -> 1/3 -1/6 -1/6; c +-1/2
    # depth 1: (a,start) +-1/8; (b,a) +-1/4; (c,b) +-1/2
    found = advantages("hgpo depth=1 gamma=0.5 std=none", judged_group(*HGPO))
    alone = Reason.NO_SHARED_STATE
    assert found == approx(
        a_c0=0.125,
        a_c1=(1 / 3 + 2 * 0.25) / 3,
        a_c2=0.5,
        b_c0=-0.125,
        b_c1=(-1 / 6 - 2 * 0.25) / 3,
        b_c2=alone,
        c_c0=alone,
        c_c1=-1 / 6,
        c_c2=-0.5,
    )


def test_hgpo_of_depth_nought_is_the_state_alone_and_alpha_weighs():
    found = advantages("hgpo depth=0 gamma=0.5 std=none", judged_group(*HGPO))
    assert found["a-c1"] == pytest.approx(1 / 3)
    even = advantages("hgpo depth=1 alpha=0 gamma=0.5 std=none", judged_group(*HGPO))
    assert even["a-c1"] == pytest.approx((1 / 3 + 0.25) / 2)


def test_hgpo_ends_its_levels_with_the_longest_episode():
    # depth 2 tells all apart that any depth can: what would follow weighs with it. (b,a) is kept to the end.
    group = judged_group(*HGPO)
    found = advantages("hgpo depth=9 gamma=0.5 std=none", group)
    assert found["a-c1"] == pytest.approx((1 / 3 + (sum(range(2, 11))) * 0.25) / sum(range(1, 11)))
    assert found["c-c2"] == pytest.approx(-0.5)
    assert found["b-c2"] == Reason.NO_SHARED_STATE
    # A level for each depth would take hours here.
    far = advantages("hgpo depth=100000 gamma=0.5 std=none", group)
    assert far["a-c1"] == pytest.approx(0.25, rel=1e-6)


def test_hgpo_bears_weights_beyond_any_float():
    found = advantages("hgpo depth=1 alpha=100000 gamma=0.5 std=none", judged_group(*HGPO))
    assert found["a-c1"] == pytest.approx(0.25)  # the finest group alone
    assert found["c-c1"] == pytest.approx(-1 / 6)  # met at depth 0 only


def test_hgpo_with_an_episode_weight_leaves_no_step_out():
    found = advantages("hgpo depth=1 gamma=0.5 std=none episode_weight=1", judged_group(*HGPO))
    assert found["b-c2"] == pytest.approx(-1 / 3)
    assert found["a-c0"] == pytest.approx(2 / 3 + 0.125)


GAE = CreditContext(values={"a-c0": 0.5, "a-c1": 0.6, "a-c2": 0.8, "b-c0": 0.4})


def test_step_gae_by_hand():
    group = judged_group(played("a", 1.0, "xyz"), played("b", 0.0))
    rule = "step_gae gamma=0.9 lam=0.5 whiten=none"
    # delta 0.04 0.12 0.2; B2 0.2, B1 0.12 + 0.45 * 0.2, B0 0.04 + 0.45 * 0.21; b: 0 - 0.4
    found = advantages(rule, group, context=GAE)
    assert found == approx(a_c0=0.1345, a_c1=0.21, a_c2=0.2, b_c0=-0.4)
    whitened = advantages("step_gae gamma=0.9 lam=0.5", group, context=GAE)
    # mean 0.036125; squares 0.2569702 / 3, deviation 0.2926717
    assert whitened == approx(a_c0=0.3361275, a_c1=0.5940958, a_c2=0.5599278, b_c0=-1.4901511)
    # episodes: means 0.1815 and -0.4, middle -0.10925;
    # variance (0.24375^2 + 0.31925^2 + 0.30925^2) / 3 + 0.29075^2
    by_episode = advantages("step_gae gamma=0.9 lam=0.5 whiten=episodes", group, context=GAE)
    deviation = ((0.24375**2 + 0.31925**2 + 0.30925**2) / 3 + 0.29075**2) ** 0.5
    assert by_episode["b-c0"] == pytest.approx((-0.4 + 0.10925) / deviation)


def test_what_the_critic_learns_is_not_whitened():
    options = StepGaeOptions(gamma=0.9, lam=0.5)
    found = value_targets(played("a", 1.0, "xyz"), options, GAE.values)
    assert found == {"a-c0": pytest.approx(0.6345), "a-c1": pytest.approx(0.81), "a-c2": pytest.approx(1.0)}


def test_a_step_without_a_value_is_passed_through():
    values = {"a-c0": 0.5, "a-c2": 0.8}
    rule = "step_gae gamma=0.9 lam=0.5 whiten=none"
    found = advantages(rule, judged_group(played("a", 1.0, "xyz")), context=CreditContext(values=values))
    # V of the middle as if it were 0.9 * 0.8; delta_0 = 0.9 * 0.72 - 0.5; B0 = 0.148 + 0.45^2 * 0.2
    assert found == approx(a_c0=0.148 + 0.2025 * 0.2, a_c1=Reason.NO_VALUE, a_c2=0.2)


def test_step_gae_without_a_critic_is_refused():
    with pytest.raises(UserError, match="needs a critic's values"):
        advantages("step_gae", judged([1.0, 0.0]))


INTERMEDIATE = judged_group(
    played("a", 1.0, "xy", rewards={0: 0.5}), played("b", 0.0, "xyz", rewards={0: 0.0})
)


def test_intermediate_rewards_by_position():
    # G: a 1.5 1, b 0 0 0
    found = advantages("intermediate std=none", INTERMEDIATE)
    assert found == approx(a_c0=0.75, a_c1=0.5, b_c0=-0.75, b_c1=-0.5, b_c2=Reason.NO_SIBLING_STEP)


def test_intermediate_rewards_over_the_group():
    found = advantages("intermediate std=none compare=group", INTERMEDIATE)  # mean (1.25 + 0) / 2
    assert found == approx(a_c0=0.875, a_c1=0.375, b_c0=-0.625, b_c1=-0.625, b_c2=-0.625)
    # variance (0.875^2 + 0.375^2) / 2 + 0.625^2 = 0.84375
    scaled = advantages("intermediate compare=group", INTERMEDIATE)
    assert scaled["a-c0"] == pytest.approx(0.875 / 0.84375**0.5)
    population = advantages("intermediate compare=group std=population eps=0.5", INTERMEDIATE)
    assert population["a-c0"] == pytest.approx(0.875 / ((0.84375 / 2) ** 0.5 + 0.5))


def test_equal_positions_are_said():
    group = judged_group(played("a", 1.0, "xy", rewards={0: -1.0}), played("b", 0.0, "xy", rewards={1: 0.0}))
    # G: a 0 1, b 0 0
    found = advantages("intermediate std=none", group)
    assert found == approx(a_c0=Reason.EQUAL_ADVANTAGES, b_c0=Reason.EQUAL_ADVANTAGES, a_c1=0.5, b_c1=-0.5)


MAS = (
    played("a", 1.0, "xy", agents=["p", "w"], agent_rewards={"w": 0.2}),
    played("b", 0.0, "x", agents=["p"]),
    played("c", 0.0, "xy", agents=["p", "w"], agent_rewards={"w": 0.8}),
)


def test_each_agent_is_compared_with_itself():
    found = advantages("dr_mas std=none agent_rewards=ignore", judged_group(*MAS))
    assert found == approx(a_c0=2 / 3, b_c0=-1 / 3, c_c0=-1 / 3, a_c1=0.5, c_c1=-0.5)
    replaced = advantages("dr_mas std=none", judged_group(*MAS))
    assert replaced == approx(a_c0=2 / 3, b_c0=-1 / 3, c_c0=-1 / 3, a_c1=-0.3, c_c1=0.3)
    added = advantages("dr_mas std=none agent_rewards=add", judged_group(*MAS))
    assert (added["a-c1"], added["c-c1"]) == (pytest.approx(0.2), pytest.approx(-0.2))


def test_an_agent_judged_in_one_sibling_only_gets_no_advantage():
    silent = played("c", 0.0, "xy", agents=["p", "w"])
    found = advantages("dr_mas std=none", judged_group(*MAS[:2], silent))
    assert (found["a-c1"], found["c-c1"]) == (Reason.LONE_SURVIVOR, Reason.UNEQUAL_SOURCES)
    assert found["c-c0"] == pytest.approx(-1 / 3)


def test_a_rule_of_its_own_for_an_agent_sees_that_agents_calls_alone():
    setting = {"rule": "dr_grpo", "agents": {"w": {"rule": "turn_discount", "gamma": 0.5, "std": "none"}}}
    group = judged_group(
        played("a", 1.0, "xyz", agents=["w", "p", "w"]), played("b", 0.0, "xy", agents=["p", "w"])
    )
    # w's last call in a is its third; p's calls get the whole episode's
    assert advantages(setting, group) == approx(a_c0=0.25, a_c1=0.5, a_c2=0.5, b_c0=-0.5, b_c1=-0.5)


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
    assert why_no_comparison(values) is reason
