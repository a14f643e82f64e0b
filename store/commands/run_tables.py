"""Training runs and their steps as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from ...records import now_ms
from ...settings.train import TrainSettings
from ..run_owners import SILENT_SEC
from .tables import count_words, in_words, print_table, terminal
from .times import shown

if TYPE_CHECKING:
    from ..run_view import AgentFacts, EpisodeFacts, RunLine, RunView, StepFacts, StepView

_ENDS = 5  # episodes shown of either end of a step


_RUN_TITLES = ("run", "policy", "status", "steps", "versions", "reward", "started", "took")
_STEP_TITLES = (
    *("step", "version", "reward", "groups", "episodes", "choices", "tokens", "gap", "clipped", "grad"),
    *("tokens/s", "seconds", "left out"),
)
_WIDE = 120  # columns that a whole table of steps needs
_ON_WIDE_ONES = frozenset({"groups", "choices", "clipped", "seconds"})
_SHORT_ID = 12  # characters of a run's id that most lists can tell runs apart by

_AGENT_TITLES = ("agent", "choices trained", "tokens", "advantage", "not trained")
_EPISODE_TITLES = ("episode", "task", "reward", "choices trained", "advantage", "not trained")


def print_runs(found: Sequence[RunLine]) -> None:
    """Ids are cut on a narrow terminal, as far as they stay apart."""
    shown_chars = 99
    if terminal().width < _WIDE and len({line.id[:_SHORT_ID] for line in found}) == len(found):
        shown_chars = _SHORT_ID
    print_table(_RUN_TITLES, [(line.id[:shown_chars], *_run_row(line)) for line in found])


def print_run(view: RunView) -> None:
    _print_lines(_run_head(view.line))
    _print_pairs("settings that are not the defaults", changed_settings(view.settings))
    _print_pairs("environment", view.environment)
    terminal().print()
    if view.steps:
        hidden = _ON_WIDE_ONES if terminal().width < _WIDE else frozenset()
        kept = [title not in hidden for title in _STEP_TITLES]
        rows = [list(compress(_step_row(step), kept)) for step in view.steps]
        print_table(list(compress(_STEP_TITLES, kept)), rows)
    else:
        terminal().print("no step yet")


def print_step(view: StepView) -> None:
    console = terminal()
    _print_lines(_step_head(view))
    if view.reasons:
        console.print()
        rows = [(str(count), reason) for reason, count in view.reasons.items()]
        print_table(("choices not trained", "reason"), rows)
    if view.agents:
        console.print()
        print_table(_AGENT_TITLES, [_agent_row(agent) for agent in view.agents])
    if view.episodes:
        console.print()
        print_table(_EPISODE_TITLES, list(_ends(view.episodes)))
        console.print("look at one: lightning episodes show EPISODE", style="dim")


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from the defaults of this version of the program, and those that it does not know."""
    fields = TrainSettings.model_fields
    defaults = TrainSettings.model_construct().model_dump(mode="json", warnings=False)
    return {
        name: value
        for name, value in settings.items()
        if name not in fields or fields[name].is_required() or value != defaults.get(name)
    }


def _run_head(line: RunLine) -> Iterator[str]:
    yield f"run {line.id}"
    now = f"{_status(line)} {shown(line.ended_at_ms)}" if line.ended_at_ms else _status(line)
    if line.ended_at_ms is None and line.last_step_at_ms is not None:
        now += f", last step finished {shown(line.last_step_at_ms)}"
    yield f"  policy {line.policy}, begun {shown(line.created_at_ms)}, {now}, {_took(line)}"
    if line.why is not None:
        yield f"  why: {line.why}"
    if _status(line) in ("interrupted", "stopped"):
        yield f"  go on with it: lightning train --resume {line.id}"
    steps = f"{count_words(line.num_steps, 'step')} finished, {line.num_steps_trained} with new weights"
    yield f"  {steps}, versions {_versions(line)}, reward {_rewards(line)}"


def _step_head(view: StepView) -> Iterator[str]:
    facts = view.facts
    made = "no new version" if facts.to_version is None else f"version {facts.to_version}"
    if facts.trained_at_ms is None:
        made = "not finished"
    yield f"run {view.run_id}, step {facts.step}: from version {facts.from_version}, {made}"
    yield f"  planned {shown(facts.planned_at_ms)}, finished {shown(facts.trained_at_ms)}"
    episodes = f"{sum(episode.num_trained > 0 for episode in view.episodes)}/{len(view.episodes)}"
    trained = sum(agent.num_trained for agent in view.agents)
    choices = f"{trained}/{sum(agent.num_choices for agent in view.agents)}"
    reward = _form(facts.metrics.get("reward_mean"), ".3f")
    yield f"  trained: episodes {episodes}, choices {choices}; mean reward {reward}"


def _print_lines(lines: Iterator[str]) -> None:
    """The first one is a heading."""
    for number, line in enumerate(lines):
        terminal().print(line, style=None if number else "bold", markup=False)


def _print_pairs(title: str, pairs: Mapping[str, Any]) -> None:
    console = terminal()
    console.print(title, style="bold")
    for name, value in pairs.items():
        console.print(f"  {name} = {in_words(value)}", markup=False)
    if not pairs:
        console.print("  none")


def _run_row(line: RunLine) -> tuple[str, ...]:
    trained = line.num_steps_trained
    return (
        line.policy,
        _status(line),
        str(trained) if trained == line.num_steps else f"{trained}/{line.num_steps}",
        _versions(line),
        _rewards(line),
        shown(line.created_at_ms),
        _took(line),
    )


def _step_row(step: StepFacts) -> tuple[str, ...]:
    m = step.metrics
    made = "-" if step.to_version is None else str(step.to_version)
    return (
        str(step.step),
        f"{step.from_version} -> {made}",
        _form(m.get("reward_mean"), ".3f"),
        f"{m.get('groups_trained', '-')}/{m.get('groups', '-')}",
        f"{m.get('episodes_trained', '-')}/{m.get('episodes', '-')}",
        f"{m.get('choices_trained', '-')}/{m.get('choices', '-')}",
        str(m.get("trained_tokens", "-")),
        _form(m.get("gap_mean"), ".4f"),
        _form(m.get("clip_fraction"), ".1%"),
        _form(m.get("grad_norm"), ".3g"),
        _form(m.get("call_tokens_per_sec"), ".0f"),
        _form(m.get("seconds"), ".1f"),
        _counted(m.get("episodes_excluded", {})) if m else "not finished",
    )


def _ends(episodes: Sequence[EpisodeFacts]) -> Iterator[tuple[str, ...]]:
    """The best and the worst of many."""
    hidden = len(episodes) - 2 * _ENDS
    for number, episode in enumerate(episodes):
        if hidden > 0 and number == _ENDS:
            yield (f"… {hidden} more …", "", "", "", "", "")
        if hidden <= 0 or not _ENDS <= number < len(episodes) - _ENDS:
            yield _episode_row(episode)


def _agent_row(agent: AgentFacts) -> tuple[str, ...]:
    return (
        agent.agent or "-",
        f"{agent.num_trained}/{agent.num_choices}",
        str(agent.trained_tokens),
        _form(agent.advantage_mean, "+.4f"),
        _counted(agent.reasons),
    )


def _episode_row(episode: EpisodeFacts) -> tuple[str, ...]:
    return (
        episode.id,
        episode.task_id or "-",
        _form(episode.reward, "g"),
        f"{episode.num_trained}/{episode.num_choices}",
        _form(episode.advantage_mean, "+.4f"),
        _counted(episode.reasons),
    )


def _rewards(line: RunLine) -> str:
    return f"{_form(line.first_reward, '.3f')} -> {_form(line.last_reward, '.3f')}"


def _versions(line: RunLine) -> str:
    if line.from_version is None:
        return "-"
    return f"{line.from_version} -> {'-' if line.to_version is None else line.to_version}"


def _status(line: RunLine) -> str:
    is_silent = line.silent_ms is not None and line.silent_ms >= SILENT_SEC * 1000
    return "interrupted" if is_silent else line.status


def _took(line: RunLine) -> str:
    """So far, where it has not ended."""
    until = line.ended_at_ms or (now_ms() - (line.silent_ms or 0))
    seconds = (until - line.created_at_ms) // 1000
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
