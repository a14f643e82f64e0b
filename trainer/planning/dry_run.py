"""`lightning train --dry-run`: every step that a run would make, without torch, a model or a GPU.

Plans with the same planner as the run, writes the manifests and says what is trained, what is not, and why.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import SettingsError, UnknownEpisodeError, UserError
from ...records import Call, Episode, EpisodeStatus, Group, ManifestChoice, Purpose, new_id
from ...settings.train import TrainSettings
from ...store.database import Database
from ...store.policies import live_version, next_version
from ...store.read import load_episodes, load_groups
from ...store.rewards import resolve
from ..reasons import Reason, in_words
from .manifest_files import FileKind, WrittenPlan, file_kind, write_plan
from .plan import StepPlan
from .planner import Planner
from .unmet import Met

DECIDE = (
    "credit",
    "sources",
    "unrewarded",
    "failed",
    "unequal_sources",
    "train_agents",
    "max_staleness",
    "max_sequence_tokens",
    "too_long",
    "weighting",
    "constant_tokens",
    "groups_per_step",
    "max_steps",
)
"""The settings that decide what is trained; kept with the manifests."""


@dataclass(frozen=True, slots=True)
class ExplainedChoice:
    """One choice of what `--explain` asked about. `step` None: no step has it."""

    episode_id: str
    call_id: str
    ordinal: int
    agent: str | None
    choice_index: int
    step: int | None
    advantage: float | None
    multiplier: float
    reason: str | None
    why: str


@dataclass(frozen=True, slots=True)
class DryRun:
    plan: WrittenPlan
    files: FileKind
    explained: tuple[ExplainedChoice, ...]
    reward_path: str | None  # of the explained episode
    shown_db: str
    notices: tuple[str, ...] = ()  # for people: names in the settings that nothing bears

    def command(self) -> str:
        """That trains exactly what was written."""
        plan = self.plan
        words = ["lightning", "train", "--manifests", str(plan.folder), "--model", "FOLDER"]
        words += ["--policy", plan.policy] if plan.policy != "policy" else []
        words += ["--from-base"] if plan.start_from_base else []
        return shlex.join([*words, "--db", self.shown_db])

    def as_json(self) -> dict[str, Any]:
        trained = [step for step in self.plan.steps if step.trains]
        return {
            "folder": str(self.plan.folder),
            "files": self.files,
            "policy": self.plan.policy,
            "start_version": self.plan.start_version,
            "steps": [
                {
                    "step": step.manifest.step,
                    "from_version": step.manifest.from_version,
                    "trains": step.trains,
                    **asdict(step.counts),
                }
                for step in self.plan.steps
            ],
            "steps_trained": len(trained),
            "choices_trained": sum(step.counts.choices_trained for step in trained),
            "trained_tokens": sum(step.counts.trained_tokens for step in trained),
            "explained": [asdict(row) for row in self.explained],
            "reward_path": self.reward_path,
            "notices": list(self.notices),
        }


def dry_run(
    settings: TrainSettings, *, explain: str | None = None, on_step: Callable[[int], None] = lambda _: None
) -> DryRun:
    """Plan, write and explain; `on_step` gets the number of steps so far. NothingToTrainError where no group
    is ready."""
    if settings.watch:
        raise SettingsError("--dry-run plans what is ready now; it can't --watch")
    database = Database.open(settings.db, must_exist=True)
    try:
        run_id = new_id()
        planner = Planner.of(database, settings, run_id)
        met = Met()
        start, steps = plan_steps(planner, settings, met, on_step)
        if not steps:
            raise planner.source.nothing_ready()
        plan = WrittenPlan(
            folder=settings.manifests or settings.output / f"dry-run-{run_id}",
            policy=settings.policy,
            start_version=start,
            start_from_base=settings.from_base,
            settings=decisive_settings(settings, planner),
            steps=tuple(steps),
        )
        explained, path = _explain(database, plan, planner, explain) if explain is not None else ((), None)
        kind = file_kind()
        write_plan(plan, kind)
        notices = tuple(met.notices(planner.settings, "what was planned"))
        return DryRun(plan, kind, explained, path, database.shown_url, notices)
    finally:
        database.close()


def plan_steps(
    planner: Planner, settings: TrainSettings, met: Met, on_step: Callable[[int], None] = lambda _: None
) -> tuple[int, list[StepPlan]]:
    """The version that the run starts from, and its steps: the numbers of versions go on as a run's do.
    `met` is told of every group."""
    if (rule := planner.settings.credit.first_reading("values")) is not None:
        raise SettingsError(
            f"the credit rule {rule} reads a critic's values, which only a run has; plan with another rule"
        )
    with planner.database.read() as conn:
        live = live_version(conn, settings.policy)
        following = next_version(conn, settings.policy)
    start = 0 if settings.from_base or live is None or live.path is None else live.version
    steps: list[StepPlan] = []
    version, trained = start, 0
    for groups in planner.source.ready():
        step = planner.plan(groups, step=len(steps), from_version=version)
        steps.append(step)
        met.add(groups)
        on_step(len(steps))
        if step.trains:
            version = max(following, version + 1)
            trained += 1
        if trained == settings.max_steps:
            break
    return start, steps


def decisive_settings(settings: TrainSettings, planner: Planner) -> dict[str, Any]:
    chosen = settings.model_dump(mode="json", include=set(DECIDE))
    return chosen | {
        "credit": planner.settings.credit.describe(),
        "max_sequence_tokens": planner.settings.selection.max_sequence_tokens,
    }


def reasons_of(plan: WrittenPlan) -> Counter[str]:
    """How many choices of all steps are not trained, by reason."""
    found: Counter[str] = Counter()
    for step in plan.steps:
        found.update(step.counts.choices_excluded)
    return found


def _explain(
    database: Database, plan: WrittenPlan, planner: Planner, name: str
) -> tuple[tuple[ExplainedChoice, ...], str | None]:
    """Every choice of the episode, or of the call, that `name` is."""
    rows = {
        (row.call_id, row.choice_index): (step.manifest.step, row)
        for step in plan.steps
        for row in step.manifest.choices
    }
    with database.read() as conn:
        by_call = next((row.episode_id for _, row in rows.values() if row.call_id == name), None)
        try:
            episode = load_episodes(conn, [by_call or name])[0]
        except UnknownEpisodeError:
            raise UserError(
                f"{name!r} is no episode of the log, and no call of a planned step; give an episode's name"
            ) from None
        group = load_groups(conn, [episode.group_id])[0] if episode.group_id else None
    is_made_to_train = episode.purpose is Purpose.TRAIN
    nowhere = _why_nowhere(episode, group, plan) if is_made_to_train else in_words(Reason.EVALUATION)
    choices = tuple(
        _explained(episode, call, choice.index, rows.get((call.id, choice.index)), nowhere)
        for call in episode.calls
        if by_call is None or call.id == name
        for choice in call.choices
    )
    return choices, resolve(episode.rewards, planner.settings.selection.source_weights).path


def _explained(
    episode: Episode, call: Call, index: int, found: tuple[int, ManifestChoice] | None, nowhere: str
) -> ExplainedChoice:
    step, row = found if found is not None else (None, None)
    if row is None:
        why = nowhere
    elif row.reason is not None:
        why = in_words(row.reason)
    else:
        why = "trained"
    return ExplainedChoice(
        episode_id=episode.id,
        call_id=call.id,
        ordinal=call.ordinal,
        agent=call.agent,
        choice_index=index,
        step=step,
        advantage=row.advantage if row else None,
        multiplier=row.multiplier if row else 0.0,
        reason=row.reason if row else None,
        why=why,
    )


def _why_nowhere(episode: Episode, group: Group | None, plan: WrittenPlan) -> str:
    """Why no step has the episode's group."""
    if group is None:
        return "the episode has no task, so it is in no group (X-Lightning-Task)"
    made_to_train = [member for member in group.episodes if member.purpose is Purpose.TRAIN]
    running = [member.id for member in made_to_train if member.status is EpisodeStatus.RUNNING]
    if running:
        return f"episode {running[0]} of its group has not ended"
    if group.expected_size is not None and len(made_to_train) < group.expected_size:
        return f"its group has {len(made_to_train)} of {group.expected_size} episodes"
    ended = [member for member in made_to_train if member.status is EpisodeStatus.ENDED]
    if not any(resolve(member.rewards).value is not None for member in ended):
        return "no ended episode of its group has a reward"
    if not any(call.policy == plan.policy for member in ended for call in member.calls):
        return f"no ended episode of its group was served by policy {plan.policy!r}"
    return "its group was trained already, or comes after the last step (max_steps)"


def table_rows(plan: WrittenPlan) -> Iterator[Sequence[str]]:
    """One row per step, for people."""
    for step in plan.steps:
        counts = step.counts
        given = [abs(row.advantage) for row in step.manifest.choices if row.advantage is not None]
        yield (
            str(step.manifest.step),
            str(step.manifest.from_version),
            f"{counts.groups_trained}/{counts.groups}",
            f"{counts.episodes_trained}/{counts.episodes}",
            f"{counts.choices_trained}/{counts.choices}",
            str(counts.trained_tokens),
            "-" if counts.reward_mean is None else _short(counts.reward_mean),
            _short(sum(given) / len(given)) if given else "-",
            _short(max(given)) if given else "-",
            _said(counts.episodes_excluded),
        )


EXPLAINED_TITLES = ("call", "id", "agent", "choice", "step", "advantage", "multiplier", "why")


def explained_rows(found: DryRun) -> Iterator[Sequence[str]]:
    for row in found.explained:
        yield (
            f"#{row.ordinal}",
            row.call_id,
            row.agent or "",
            str(row.choice_index),
            "-" if row.step is None else str(row.step),
            "-" if row.advantage is None else _short(row.advantage, "+.4f"),
            f"{row.multiplier:.3g}",
            row.why if row.reason is None else f"{row.reason}: {row.why}",
        )


TITLES = ("step", "from", "groups", "episodes", "choices", "tokens", "reward", "|A| mean", "max", "left out")


def _short(number: float, form: str = ".3f") -> str:
    return f"{number:{form}}" if abs(number) < 1e6 else f"{number:.4g}"


def _said(excluded: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in excluded.items())
