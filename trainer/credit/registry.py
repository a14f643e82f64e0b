"""The credit rules by name, ours and those of other packages, and a rule with its options made ready.

A package adds one with an entry point in the group `lightning_rl.credit` that names a `base.CreditRule`. Its
code is imported when somebody asks for the rule, not before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from ...errors import SettingsError
from . import (
    dr_grpo,
    dr_mas,
    gigpo,
    grpo,
    hgpo,
    intermediate,
    lightning,
    maxrl,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    running_baseline,
    sr_ppo,
    step_gae,
    turn_discount,
)
from .base import (
    ChoiceKey,
    Credit,
    CreditContext,
    CreditRule,
    JudgedGroup,
    Reads,
    RuleOptions,
    Values,
    restricted,
)

ENTRY_POINTS = "lightning_rl.credit"

_OURS: tuple[CreditRule[Any], ...] = (
    lightning.RULE,
    turn_discount.RULE,
    grpo.RULE,
    dr_grpo.RULE,
    rloo.RULE,
    reinforce_pp.RULE,
    reinforce_pp_baseline.RULE,
    maxrl.RULE,
    running_baseline.RULE,
    gigpo.RULE,
    hgpo.RULE,
    step_gae.RULE,
    sr_ppo.RULE,
    intermediate.RULE,
    dr_mas.RULE,
)
RULES: Mapping[str, CreditRule[Any]] = {rule.name: rule for rule in _OURS}


@dataclass(frozen=True, slots=True)
class ConfiguredRule:
    """A rule with its options."""

    rule: CreditRule[Any]
    options: RuleOptions


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rule gives credit to whose calls.

    An agent with a rule of its own is judged on its own calls alone, as if they were the whole episode; all
    other calls get what the default makes of the whole episode.
    """

    default: ConfiguredRule
    agents: Mapping[str, ConfiguredRule]

    def assign(self, groups: Sequence[JudgedGroup], context: CreditContext) -> dict[ChoiceKey, Credit]:
        credits = dict(self.default.rule.assign(groups, self.default.options, context))
        for agent, own in self.agents.items():
            credits |= own.rule.assign([restricted(g, agent) for g in groups], own.options, context)
        return credits

    def value_targets(self, groups: Sequence[JudgedGroup], values: Values) -> dict[str, float]:
        """What the critic should have said, by call id; an agent's own rule decides about its calls."""
        targets: dict[str, float] = {}
        for group in groups:
            if self.default.rule.targets is not None:
                targets |= self.default.rule.targets(group, self.default.options, values)
            for agent, own in self.agents.items():
                if own.rule.targets is not None:
                    targets |= own.rule.targets(restricted(group, agent), own.options, values)
        return targets

    @property
    def reads(self) -> frozenset[Reads]:
        return frozenset().union(*(own.rule.reads(own.options) for own in self._all()))

    def first_reading(self, what: Reads) -> str | None:
        """The first rule that reads it, as people know it; None: none does."""
        if what in self.default.rule.reads(self.default.options):
            return repr(self.default.rule.name)
        for agent, own in self.agents.items():
            if what in own.rule.reads(own.options):
                return f"{own.rule.name!r} of agent {agent!r}"
        return None

    @property
    def fewest_episodes(self) -> int:
        return min(own.rule.fewest_episodes for own in self._all())

    def describe(self) -> dict[str, Any]:
        """As JSON: rule and every option, defaults filled in."""
        own = {agent: _described(rule) for agent, rule in self.agents.items()}
        return _described(self.default) | ({"agents": own} if own else {})

    def _all(self) -> Iterator[ConfiguredRule]:
        yield self.default
        yield from self.agents.values()


def credit_rule(name: str) -> CreditRule[Any]:
    """SettingsError where no rule is called so, or the package that has it can't be loaded."""
    if name in RULES:
        return RULES[name]
    if name in _theirs():
        return _loaded(_theirs()[name])
    known = ", ".join(sorted([*RULES, *_theirs()]))
    raise SettingsError(f"no credit rule is called {name!r}; there is: {known}")


def known_rules() -> Iterator[tuple[str, CreditRule[Any] | SettingsError]]:
    """All by name, those of other packages loaded; a broken one is its error."""
    yield from RULES.items()
    for name, point in sorted(_theirs().items()):
        if name in RULES:
            yield name, SettingsError(f"{_origin(point)}: there is a rule {name!r} of our own; rename yours")
            continue
        try:
            yield name, _loaded(point)
        except SettingsError as error:
            yield name, error


def configure(setting: str | Mapping[str, Any]) -> Assignment:
    """From the setting `credit`: a rule's name, a name with options ("gigpo omega=0.5"), or a table of
    `rule`, its options, and `agents`.

    `agents` maps an agent to a name or a table of its own. SettingsError in one line.
    """
    table = _said_in_words(setting) if isinstance(setting, str) else dict(setting)
    agents: Any = table.pop("agents", {})
    if not isinstance(agents, Mapping):
        raise SettingsError('credit.agents must be a table: [credit.agents.NAME] rule = "..."')
    own = {str(agent): _configured(value, f"credit.agents.{agent}") for agent, value in agents.items()}
    return Assignment(_configured(table, "credit"), own)


def _configured(setting: Any, where: str) -> ConfiguredRule:
    if not isinstance(setting, str | Mapping):
        raise SettingsError(f"{where} must be a rule's name or a table, not {setting!r}")
    table = _said_in_words(setting) if isinstance(setting, str) else dict(setting)
    name = table.pop("rule", "lightning")
    if not isinstance(name, str):
        raise SettingsError(f"{where}.rule must be a rule's name, not {name!r}")
    rule = credit_rule(name)
    try:
        return ConfiguredRule(rule, rule.options.model_validate(table))
    except ValidationError as error:
        fault = error.errors()[0]
        option = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            has = ", ".join(rule.options.model_fields) or "none"
            raise SettingsError(
                f"{where}: the credit rule {rule.name!r} has no option {option!r}; its options: {has}"
            ) from None
        raise SettingsError(f"{where}.{option}: {fault['msg']} (got {fault['input']!r})") from None


def _said_in_words(setting: str) -> dict[str, Any]:
    """ "gigpo omega=0.5 std=none" as a table; what is no JSON is a string."""
    name, *options = setting.split() or [""]
    table: dict[str, Any] = {"rule": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise SettingsError(f"credit {setting!r}: write options as NAME=VALUE, not {option!r}")
        if key in table:
            twice = "the rule is the first word" if key == "rule" else f"{key} is said twice"
            raise SettingsError(f"credit {setting!r}: {twice}; leave {option!r} out")
        try:
            table[key] = json.loads(value)
        except ValueError:
            table[key] = value
    return table


def _described(own: ConfiguredRule) -> dict[str, Any]:
    return {"rule": own.rule.name, **own.options.model_dump(mode="json")}


@cache
def _theirs() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _loaded(point: EntryPoint) -> CreditRule[Any]:
    try:
        rule = point.load()
    except Exception as error:  # noqa: BLE001  (another package's code: whatever it raises is one line)
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(f"the credit rule of {_origin(point)} can't be loaded: {why}") from None
    if not isinstance(rule, CreditRule):
        raise SettingsError(f"{_origin(point)} is no CreditRule but a {type(rule).__name__}")
    return rule


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "?"
    return f"{package} ({point.name} = {point.value})"
