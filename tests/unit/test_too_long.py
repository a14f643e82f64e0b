"""Calls beyond `max_sequence_tokens`: their loss is lost with a reason, their place and credit are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.episodes import call, choice, episode, group
from fakes.log_rows import choice as recorded
from fakes.log_rows import end, intent, reward

from lightning_rl.records import CallKind
from lightning_rl.settings.train import DryRunSettings
from lightning_rl.store.append import append_entries, create_episode
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward
from lightning_rl.trainer.credit.base import CreditContext
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.context_length import context_tokens
from lightning_rl.trainer.planning.dry_run import dry_run, reasons_of
from lightning_rl.trainer.planning.plan import PlanSettings, StepPlan, plan_step
from lightning_rl.trainer.planning.planner import plan_settings
from lightning_rl.trainer.planning.selection import SelectionRules
from lightning_rl.trainer.reasons import Reason
from lightning_rl.trainer.steps.values import StepValues


def plan(groups: Any, credit: str = "dr_grpo", values: Any = None, **rules: Any) -> StepPlan:
    settings = PlanSettings(SelectionRules("policy", **rules), configure(credit))
    context = CreditContext(values or {}, ())
    return plan_step(groups, settings, run_id="r", step=0, from_version=0, context=context)


def rows(planned: StepPlan) -> dict[str, Any]:
    return {row.call_id: row for row in planned.manifest.choices}


def grown(name: str, value: float) -> Any:
    """Calls of 3, 5 and 8 tokens."""
    calls = [call(f"{name}0", [1, 2], [3]), call(f"{name}1", [1, 2, 3, 4], [5])]
    calls.append(call(f"{name}2", [1, 2, 3, 4, 5, 6, 7], [8]))
    return episode(name, value, calls=calls)


GROUPS = [group("g", [grown("a", 1.0), grown("b", 0.0)])]


def test_a_call_at_the_bound_is_trained_and_one_beyond_is_not() -> None:
    assert plan(GROUPS, max_sequence_tokens=8).counts.choices_excluded == {}
    planned = plan(GROUPS, max_sequence_tokens=7)
    assert planned.counts.choices_excluded == {"too_long": 2}
    assert planned.counts.choices_trained == 4
    assert (rows(planned)["a2"].advantage, rows(planned)["a2"].multiplier) == (None, 0.0)
    assert plan(GROUPS).counts.choices_excluded == {}


def test_it_keeps_its_place_in_discounts() -> None:
    credit = "turn_discount gamma=0.5 std=none"
    whole = rows(plan(GROUPS, credit))
    cut = rows(plan(GROUPS, credit, max_sequence_tokens=5))
    assert [cut[name].advantage for name in ("a0", "a1")] == [0.125, 0.25]  # before a call not trained
    assert {cut[name].advantage for name in cut} - {None} == {
        whole[name].advantage for name in ("a0", "a1", "b0", "b1")
    }
    assert cut["b2"].reason == Reason.TOO_LONG


def test_it_keeps_its_place_in_gae() -> None:
    values = {f"{e}{k}": 0.1 * k + (e == "a") for e in "ab" for k in range(3)}
    whole = rows(plan(GROUPS, "step_gae", values))
    cut = rows(plan(GROUPS, "step_gae", values, max_sequence_tokens=5))
    for name in ("a0", "a1", "b0", "b1"):
        assert cut[name].advantage == whole[name].advantage
    assert cut["a2"].reason == Reason.TOO_LONG


def test_a_prompt_that_is_too_long_has_no_value_and_gae_sees_past_it() -> None:
    asked = []

    class Critic:
        def values(self, prompts: Any) -> list[float]:
            asked.extend(len(prompt) for prompt in prompts)
            return [0.5] * len(prompts)

    known = StepValues.of(GROUPS, Critic(), 6)  # type: ignore[arg-type]
    assert sorted(asked) == [2, 2, 4, 4]
    planned = plan(GROUPS, "step_gae", known.values, max_sequence_tokens=6)
    assert planned.counts.choices_excluded == {"too_long": 2}  # not no_value: that is its consequence
    assert rows(planned)["a1"].advantage > 0 > rows(planned)["b1"].advantage


def test_it_can_take_its_whole_episode_along() -> None:
    long, short = grown("a", 1.0), episode("b", 0.0, calls=[call("b0", [1], [2])])
    planned = plan([group("g", [long, short])], max_sequence_tokens=7, too_long="episode")
    assert planned.counts.choices_excluded == {"too_long": 3}
    assert planned.counts.episodes_excluded == {"too_long": 1}
    assert rows(planned)["b0"].advantage == -0.5  # against a sibling that is not trained


@pytest.mark.parametrize(
    "changes", [{"kind": CallKind.SIDE}, {"policy": "other"}, {"sampling": {"temperature": 0}}]
)
def test_what_would_not_be_trained_anyway_takes_nothing_along(changes: Any) -> None:
    odd = call("odd", list(range(50)), [1], **changes)
    groups = [group("g", [episode("a", 1.0, calls=[call("a0", [1], [2]), odd]), grown("b", 0.0)])]
    planned = plan(groups, max_sequence_tokens=8, too_long="episode")
    assert rows(planned)["a0"].advantage == 0.5
    assert rows(planned)["odd"].reason != Reason.TOO_LONG


def test_of_several_choices_only_the_long_one_is_left_out() -> None:
    two = call("c", [1, 2], [3], choices=(choice("c", [3]), choice("c", [3, 4, 5], index=1)))
    planned = plan([group("g", [episode("a", 1.0, calls=[two]), grown("b", 0.0)])], max_sequence_tokens=4)
    found = {row.choice_index: row.reason for row in planned.manifest.choices if row.call_id == "c"}
    assert found == {0: None, 1: Reason.TOO_LONG}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"n_positions": 1024}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ([], None),
    ],
)
def test_a_models_context_length(config: Any, tokens: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_tokens(tmp_path) == tokens


def test_the_default_is_the_models_and_the_dry_run_shows_it(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'log.db'}")
    for name, value in (("a", 1.0), ("b", 0.0)):
        prompt = list(range(3, 12))
        with database.write() as conn:
            create_episode(conn, episode_id=name, task_id="t", expected_size=2)
            for call_id, ids in ((f"{name}0", prompt[:4]), (f"{name}1", prompt)):
                told = recorded([7, 8], [-0.5, -0.5])
                append_entries(conn, [intent(call_id, name, task="t"), end(call_id, ids, told)])
            add_reward(conn, reward(name, value, final=True))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 10}')
    chosen = {"db": database.url, "output": tmp_path / "runs"}

    def planned(**changes: Any) -> Any:
        return dry_run(DryRunSettings.load(None, **chosen, **changes)).plan

    assert reasons_of(planned()) == {}  # no model, no bound
    by_model = planned(model=tmp_path / "model")
    assert reasons_of(by_model) == {"too_long": 2}
    assert by_model.settings["max_sequence_tokens"] == 10
    assert reasons_of(planned(model=tmp_path / "model", max_sequence_tokens=11)) == {}
    assert reasons_of(planned(max_sequence_tokens=10, too_long="episode")) == {"too_long": 4}
    database.close()


def test_the_models_length_reaches_the_rules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 10}')
    assert plan_settings(DryRunSettings.load(None, model=tmp_path)).selection.max_sequence_tokens == 10
