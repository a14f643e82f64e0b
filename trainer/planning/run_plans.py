"""The manifests of a run, one after another: planned now from what the log has ready, or read as a dry run
has written them.

Knows the critic's values where the credit rule reads them; what becomes of a manifest is the loop's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from ...errors import NothingToTrainError, SettingsError, UserError
from ...records import Fingerprint, Group, StepManifest
from ...settings.train import TrainSettings
from ...store.database import Database
from ...store.read import load_groups
from ...store.runs import WrittenStep, episodes_of, load_manifest
from ..credit.registry import configure
from ..place import RunPlace
from ..reasons import Reason
from ..steps.values import StepValues, Valuer
from .manifest_files import WrittenPlan, read_plan
from .plan import StepCounts, StepPlan, withheld
from .planner import NO_VALUES, Planner

if TYPE_CHECKING:
    import sqlalchemy as sa


class Teller(Protocol):
    """Who is told how far it is: what is needed of report.RunReport."""

    def doing(self, what: str, done: int = 0, total: int | None = None) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Planned:
    plan: StepPlan
    groups: list[Group]
    known: StepValues | None  # None: the run has no critic
    is_in_log: bool = False  # the manifest was written before the run was interrupted


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A manifest that was written and not trained, and the groups as they were then."""

    plan: StepPlan
    groups: list[Group]

    @classmethod
    def load(cls, conn: sa.Connection, run_id: str, step: WrittenStep) -> Self:
        manifest = load_manifest(conn, run_id, step.step)
        ids = dict.fromkeys(choice.group_id for choice in manifest.choices if choice.group_id)
        episodes = episodes_of(conn, run_id, step.step)
        groups = [_as_it_was(group, manifest, episodes) for group in load_groups(conn, ids)]
        try:
            counts = StepCounts(**(step.counts or {}))
        except TypeError:
            raise UserError(
                f"step {step.step} of run {run_id} was planned by another version of lightning: resume it "
                "with that one, or begin a new run (--fresh)"
            ) from None
        return cls(StepPlan(manifest, counts), groups)


def _as_it_was(group: Group, manifest: StepManifest, episodes: Collection[str]) -> Group:
    """Without the episodes and rewards that came after the manifest: a critic learns what it says, too."""
    found = []
    for episode in group.episodes:
        if episode.id in episodes:
            used = set(manifest.reward_ids.get(episode.id, ()))
            found.append(replace(episode, rewards=tuple(r for r in episode.rewards if r.id in used)))
    return replace(group, episodes=tuple(found))


class RunPlans:
    def __init__(
        self,
        database: Database,
        settings: TrainSettings,
        place: RunPlace,
        *,
        start_version: int,
        unfinished: Unfinished | None = None,
    ) -> None:
        """`start_version`: of the run's first step. `unfinished`: what an interrupted one has yet to do."""
        self._database, self._settings, self._place = database, settings, place
        self._start_version, self._unfinished = start_version, unfinished
        self.while_waiting: Callable[[], None] | None = None
        self.planner = Planner.of(database, settings, place.run_id)
        self._source = self.planner.source
        self.written = None if settings.manifests is None else self._written(settings.manifests)

    def require_something(self) -> None:
        """NothingToTrainError before a model is loaded, unless some step has something to train."""
        if self.planner.reads_values:  # without the critic nobody knows more than whether there are groups
            if next(iter(self._source.ready()), None) is None:
                raise self._source.nothing_ready()
            return
        last: StepPlan | None = None
        plans = (self._plan(groups) for groups in self._source.ready())
        for last in plans if self.written is None else self.written.steps:
            if last.trains:
                return
        if last is None:
            raise self._source.nothing_ready()
        raise NothingToTrainError(f"nothing to train: {last.counts.why_nothing()}")

    def each(
        self,
        report: Teller,
        critic: Valuer | None,
        check_engines: Callable[[Sequence[Fingerprint]], None],
    ) -> Iterator[Planned]:
        """Each step with its groups; planned when it is asked for, with the weights' version of then."""
        longest = self.planner.settings.selection.max_sequence_tokens
        if self._unfinished is not None:
            plan, groups = self._unfinished.plan, self._unfinished.groups
            report.message(f"step {plan.manifest.step} is trained as its manifest was written")
            check_engines(self._source.fingerprints(groups))
            known = None if critic is None else StepValues.of(groups, critic, longest)
            yield Planned(plan, groups, known, is_in_log=True)
        if self.written is None:
            for groups in self._groups(report):
                check_engines(self._source.fingerprints(groups))
                known = None if critic is None else StepValues.of(groups, critic, longest)
                yield Planned(self._plan(groups, known), groups, known)
            return
        report.message(f"training the {len(self.written.steps)} steps of {self.written.folder} as written")
        for plan in self.written.steps[self._place.steps_planned :]:
            place = self._place
            manifest = replace(plan.manifest, run_id=place.run_id, from_version=place.version)
            ids = dict.fromkeys(choice.group_id for choice in manifest.choices if choice.group_id)
            with self._database.read() as conn:
                groups = load_groups(conn, ids)
            check_engines(self._source.fingerprints(groups))
            yield Planned(replace(plan, manifest=manifest), groups, None)

    def _plan(self, groups: Sequence[Group], known: StepValues | None = None) -> StepPlan:
        values = NO_VALUES if known is None else known.values
        step = self._place.steps_planned
        plan = self.planner.plan(groups, step=step, from_version=self._place.version, values=values)
        if self.planner.reads_values and step < self._settings.critic_warmup_steps:
            return withheld(plan, Reason.CRITIC_WARM_UP)
        return plan

    def _written(self, folder: Path) -> WrittenPlan:
        """A dry run to train as it is. UserError unless it was planned for this policy and these weights."""
        if self._settings.watch:
            raise SettingsError("--manifests trains a written plan; it can't --watch")
        plan = read_plan(folder)
        if plan.policy != self._settings.policy:
            raise UserError(f"{folder} was planned for policy {plan.policy!r}, not {self._settings.policy!r}")
        if plan.start_version != self._start_version:
            raise UserError(
                f"{folder} was planned from version {plan.start_version} of policy {plan.policy!r}, but this "
                f"run starts from version {self._start_version}: write the dry run anew, or pass --from-base "
                "to both"
            )
        _require_as_planned(plan, self._settings)
        return plan

    def _groups(self, report: Teller) -> Iterator[list[Group]]:
        if not self._settings.watch:
            return self._source.ready()
        wanted = self._settings.groups_per_step

        def on_wait(ready: int) -> None:
            report.doing(f"waiting for groups: {ready} of {wanted} ready", ready, wanted)
            if self.while_waiting is not None:
                self.while_waiting()

        return self._source.as_they_come(on_wait)


def _require_as_planned(plan: WrittenPlan, settings: TrainSettings) -> None:
    """SettingsError where something was said now that the plan has decided otherwise. `max_steps` still ends
    the run earlier."""
    said = settings.model_dump(mode="json")
    for name in sorted(settings.model_fields_set & set(plan.settings) - {"max_steps"}):
        now, then = said[name], plan.settings[name]
        if name == "credit":
            now = configure(settings.credit).describe()
        elif name == "train_agents":
            now, then = sorted(now), sorted(then)
        if now != then:
            raise SettingsError(
                f"{plan.folder} was planned with {name} = {then}, and {said[name]} would change what it "
                f"trains: leave {name} out, or write the dry run anew"
            )
