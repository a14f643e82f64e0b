"""Rules by name: their options, their mistakes in one line, and those of other packages."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from fakes.episodes import judged
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.errors import SettingsError
from lightning_rl.trainer.credit import registry
from lightning_rl.trainer.credit.base import CreditContext, CreditRule
from lightning_rl.trainer.credit.dr_grpo import RULE as DR_GRPO
from lightning_rl.trainer.credit.registry import RULES, configure, credit_rule, known_rules


def test_every_rule_says_what_it_is():
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule.formula
        assert rule.paper
        assert all(field.description for field in rule.options.model_fields.values())
        assert configure(name).describe() == {"rule": name, **rule.options().model_dump(mode="json")}


def test_a_name_with_options_is_a_table():
    words = configure("gigpo omega=0.5 std=none call_rewards=false")
    table = configure({"rule": "gigpo", "omega": 0.5, "std": "none", "call_rewards": False})
    assert words == table
    assert words.describe()["omega"] == 0.5
    assert configure({}).default.rule.name == "lightning"


def test_what_is_read_and_how_many_it_takes():
    assert configure("gigpo").reads == {"calls"}
    assert configure("gigpo call_rewards=false").reads == frozenset()
    assert configure({"rule": "grpo", "agents": {"w": "step_gae"}}).reads == {"values", "calls"}
    assert (configure("grpo").fewest_episodes, configure("running_baseline").fewest_episodes) == (2, 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gea", r"no credit rule is called 'gea'; there is: dr_grpo, "),
        ("gigpo omga=1", r"'gigpo' has no option 'omga'; its options: std, eps"),
        ("dr_grpo std=none", r"'dr_grpo' has no option 'std'; its options: none"),
        ("gigpo omega=-1", r"credit\.omega: .*greater than or equal to 0 \(got -1\)"),
        ("gigpo gamma=much", r"credit\.gamma: .*number.*'much'"),
        ("lightning eps=inf", r"credit\.eps: .*finite"),
        ("gigpo omega=Infinity", r"credit\.omega: .*finite"),
        ("lightning eps=1e308", r"credit\.eps: .*less than or equal to 1000000"),
        ("hgpo depth=100001", r"credit\.depth: .*less than or equal to 100000"),
        ("grpo rule=rloo", r"credit 'grpo rule=rloo': the rule is the first word; leave 'rule=rloo' out"),
        ("gigpo omega=1 omega=2", r"omega is said twice; leave 'omega=2' out"),
        ("gigpo omega", r"write options as NAME=VALUE, not 'omega'"),
        ({"rule": 3}, r"credit\.rule must be a rule's name, not 3"),
        ({"agents": "w"}, r"credit\.agents must be a table"),
        ({"agents": {"w": 1}}, r"credit\.agents\.w must be a rule's name or a table"),
        ({"agents": {"w": {"rule": "grpo", "x": 1}}}, r"credit\.agents\.w: .*no option 'x'"),
        ("", r"no credit rule is called ''"),
    ],
)
def test_mistakes_are_one_line(setting, message):
    with pytest.raises(SettingsError, match=message) as caught:
        configure(setting)
    assert "\n" not in str(caught.value)


@pytest.fixture
def plugin(monkeypatch):
    def install(name: str, value: str) -> None:
        points = {name: EntryPoint(name, value, registry.ENTRY_POINTS)}
        monkeypatch.setattr(registry, "_theirs", lambda: points)

    return install


THEIRS = CreditRule("mine", "A = 1", "none", DR_GRPO.options, DR_GRPO.assign)
NOT_A_RULE = 3


def test_a_rule_of_another_package(plugin):
    plugin("mine", f"{__name__}:THEIRS")
    assert credit_rule("mine") == THEIRS
    assert configure("mine").assign([judged([1.0, 0.0])], CreditContext())["e0-c0", 0].advantage == 0.5
    assert dict(known_rules())["mine"] == THEIRS


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mine", "no_such_package:RULE", r"mine = no_such_package:RULE\) can't be loaded: No module named"),
        ("mine", f"{__name__}:NOT_THERE", r"can't be loaded: .*NOT_THERE"),
        ("mine", f"{__name__}:NOT_A_RULE", r"is no CreditRule but a int"),
    ],
)
def test_a_broken_plugin_is_one_line_and_breaks_nothing_else(plugin, name, value, message):
    plugin(name, value)
    with pytest.raises(SettingsError, match=message):
        configure(name)
    listed = dict(known_rules())
    assert isinstance(listed[name], SettingsError)
    assert listed["grpo"] is RULES["grpo"]
    assert configure("grpo").default.rule is RULES["grpo"]


def test_a_plugin_takes_no_name_of_ours(plugin):
    plugin("grpo", f"{__name__}:THEIRS")
    assert credit_rule("grpo") is RULES["grpo"]
    assert any(isinstance(rule, SettingsError) for _, rule in known_rules())


def test_the_list_is_for_people_and_programs(plugin):
    plugin("mine", "no_such_package:RULE")
    shown = CliRunner().invoke(app, ["credit", "list"], env={"COLUMNS": "40"})
    assert shown.exit_code == 0, "no terminal: formulas are not wrapped"
    assert "A_e = R_e - mean_g R" in shown.output
    assert "broken:" in shown.output
    printed = json.loads(CliRunner().invoke(app, ["credit", "list", "--json"]).output)
    rules = {rule["rule"]: rule for rule in printed["rules"]}
    assert rules["gigpo"]["options"]["omega"]["default"] == 1.0
    assert rules["rloo"]["options"] == {}
    assert "can't be loaded" in rules["mine"]["error"]
