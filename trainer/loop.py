"""A training run: groups -> manifest -> optimizer step -> version folder -> candidate -> verdict, and again.

Everything that the log has to know is written before it happens (the manifest) or with what it belongs to
(candidate row and finished step in one transaction), so that Ctrl-C or a crash at any point leaves a usable
database. The loop is a generator of micro-batches that the trainer asks for the next step: its loss,
optimizer and schedule are the bridge's matter, and so is everything about torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..errors import NothingToTrainError, SettingsError, UserError
from ..records import Group, PolicyVersion, VersionStatus, new_id
from ..settings import TrainSettings
from ..store.database import Database
from ..store.policies import add_candidate, live_version, versions
from ..store.read import load_groups
from ..store.runs import add_manifest, create_run, end_run, finish_step
from .batches.packing import MicroBatch, cheapest_batches
from .candidate import Handover, Probe
from .planning.manifest_files import WrittenPlan, read_plan
from .planning.plan import StepPlan, transitions, withheld
from .planning.planner import NO_VALUES, Planner, plan_settings
from .planning.reasons import Reason
from .process import environment, sigterm_interrupts
from .report import RunReport, StepLine
from .steps import models
from .steps.step_trainer import StepTrainer, build_trainer, correction_of, measured, require_finite, timed
from .steps.values import StepValues, Valuer


@dataclass(frozen=True, slots=True)
class RunSummary:
    run_id: str
    status: str  # "finished" | "stopped"
    steps_trained: int
    version: int  # of the last weights
    folder: Path


class KeptValuer(Valuer, Protocol):
    """What a run needs of critic.Critic."""

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: StepPlan
    groups: list[Group]
    known: StepValues | None  # None: the run has no critic


def train(settings: TrainSettings, *, as_json: bool = False) -> RunSummary:
    """Run to the end of what there is, for ever with `watch`, or until SIGINT or SIGTERM."""
    models.check_folder(settings.model)
    plan_settings(settings)
    database = Database.open(settings.db, must_exist=not settings.watch)
    try:
        return TrainingRun(database, settings).run(as_json=as_json)
    finally:
        database.close()


class TrainingRun:
    def __init__(self, database: Database, settings: TrainSettings) -> None:
        self.database, self.settings = database, settings
        self.run_id = new_id()
        self.folder = settings.output.resolve() / self.run_id
        self.planner = Planner.of(database, settings, self.run_id)
        self.source = self.planner.source
        with database.read() as conn:
            if settings.publish:
                _require_none_waiting(versions(conn, settings.policy))
            self.start = models.start_weights(settings, live_version(conn, settings.policy))
        self.version = self.start.version
        self.written = None if settings.manifests is None else self._written(settings.manifests)
        self.steps_planned = 0
        self.steps_trained = 0
        self.handover = Handover(database, settings, self.run_id, self.folder / "versions")
        self.critic: KeptValuer | None = None

    def run(self, *, as_json: bool) -> RunSummary:
        if not self.settings.watch:
            self._require_something()
        on_gpu = models.use_device(self.settings)
        tokenizer = models.load_tokenizer(self.settings.model)
        self._create_folder()
        with self.database.write() as conn:
            settings = self.settings.model_dump(mode="json", exclude={"db"})
            settings |= {} if self.written is None else self.written.settings
            create_run(conn, self.run_id, self.settings.policy, settings, environment(on_gpu))
        status = "failed"
        with RunReport(self.folder, as_json=as_json, progress=self.settings.progress) as report:
            try:
                with sigterm_interrupts(), models.one_line_for_full_memory():
                    report.doing("loading the model")
                    trainer = build_trainer(self.settings, self.start, tokenizer, self.folder, on_gpu)
                    trainer.steps = self._steps(trainer, tokenizer, report)
                    trainer.train()
                status = "finished"
            except KeyboardInterrupt:
                status = "stopped"
                report.message(
                    f"stopped after {self.steps_trained} steps; the log and every version are whole"
                )
            finally:
                with self.database.write() as conn:
                    end_run(conn, self.run_id, status)
        return RunSummary(self.run_id, status, self.steps_trained, self.version, self.folder)

    def _require_something(self) -> None:
        """NothingToTrainError before a model is loaded, unless some step has something to train."""
        if self.planner.reads_values:  # without the critic nobody knows more than whether there are groups
            if next(iter(self.source.ready()), None) is None:
                raise self.source.nothing_ready()
            return
        last: StepPlan | None = None
        plans = (self._plan(groups) for groups in self.source.ready())
        for last in plans if self.written is None else self.written.steps:
            if last.trains:
                return
        if last is None:
            raise self.source.nothing_ready()
        raise NothingToTrainError(f"nothing to train: {last.counts.why_nothing()}")

    def _plan(self, groups: Sequence[Group], known: StepValues | None = None) -> StepPlan:
        values = NO_VALUES if known is None else known.values
        plan = self.planner.plan(groups, step=self.steps_planned, from_version=self.version, values=values)
        if self.planner.reads_values and self.steps_planned < self.settings.critic_warmup_steps:
            return withheld(plan, Reason.CRITIC_WARM_UP)
        return plan

    def _written(self, folder: Path) -> WrittenPlan:
        """A dry run to train as it is. UserError unless it was planned for this policy and these weights."""
        if self.settings.watch:
            raise SettingsError("--manifests trains a written plan; it can't --watch")
        plan = read_plan(folder)
        if plan.policy != self.settings.policy:
            raise UserError(f"{folder} was planned for policy {plan.policy!r}, not {self.settings.policy!r}")
        if plan.start_version != self.version:
            raise UserError(
                f"{folder} was planned from version {plan.start_version} of policy {plan.policy!r}, but this "
                f"run starts from version {self.version}: write the dry run anew, or pass --from-base to both"
            )
        return plan

    def _plans(self, report: RunReport, tokenizer: Any) -> Iterator[_Planned]:
        """Each step with its groups: planned now, or as a dry run has written it."""
        if self.written is None:
            for groups in self._groups(report):
                models.check_tokenizer(tokenizer, self.source.fingerprints(groups), self.settings.model)
                known = None if self.critic is None else StepValues.of(groups, self.critic)
                yield _Planned(self._plan(groups, known), groups, known)
            return
        report.message(f"training the {len(self.written.steps)} steps of {self.written.folder} as written")
        for plan in self.written.steps:
            manifest = replace(plan.manifest, run_id=self.run_id, from_version=self.version)
            ids = dict.fromkeys(choice.group_id for choice in manifest.choices if choice.group_id)
            with self.database.read() as conn:
                groups = load_groups(conn, ids)
            models.check_tokenizer(tokenizer, self.source.fingerprints(groups), self.settings.model)
            yield _Planned(replace(plan, manifest=manifest), groups, None)

    def _steps(
        self, trainer: StepTrainer, tokenizer: Any, report: RunReport
    ) -> Iterator[Sequence[MicroBatch]]:
        """The generator that the trainer pulls: after each `yield` the optimizer step has been taken."""
        shape = models.shape_of(trainer.model)
        if not shape.shares_prefixes:
            report.message(
                "this model can't share prefixes (sliding or linear attention): computing rows of whole "
                "sequences"
            )
        if self.planner.reads_values:
            self.critic = models.load_critic(self.settings, self.start, trainer.model, shape)
        num_embeddings = trainer.model.get_input_embeddings().weight.shape[0]
        for planned in self._plans(report, tokenizer):
            began = time.monotonic()
            plan = planned.plan
            trained = transitions(plan.manifest, planned.groups)
            models.check_ids(trained, num_embeddings, self.settings.model)
            with self.database.write() as conn:
                add_manifest(conn, plan.manifest)
            self.steps_planned += 1
            line = StepLine.counted(plan.counts, step=plan.manifest.step, from_version=self.version)
            if not plan.trains:
                self._finish_empty(plan, self._teach(planned, line, report), report)
                continue
            probe = Probe.before_step(trainer, trained, self.settings.micro_batch_tokens)
            batches = cheapest_batches(trained, self.settings.micro_batch_tokens, shape)
            trainer.on_micro_batch = partial(report.doing, f"step {line.step}")
            started = time.monotonic()
            mode = correction_of(self.settings, plan.manifest, planned.groups)
            if mode != "off":
                batches = trainer.corrected(batches, mode, self.settings.correction_cap)
            for epoch in range(self.settings.epochs):
                yield batches
                require_finite(trainer.metrics, line.step)
                if epoch == 0:
                    line = measured(line, trainer.metrics, len(batches))
            line = timed(line, time.monotonic() - started)
            line = self._teach(planned, line, report)
            self._hand_over(trainer, probe, line, began, report)
            if self.steps_trained == self.settings.max_steps:
                return

    def _groups(self, report: RunReport) -> Iterator[list[Group]]:
        if not self.settings.watch:
            return self.source.ready()
        wanted = self.settings.groups_per_step
        return self.source.as_they_come(
            lambda ready: report.doing(f"waiting for groups: {ready} of {wanted} ready", ready, wanted)
        )

    def _teach(self, planned: _Planned, line: StepLine, report: RunReport) -> StepLine:
        """The critic learns from every step, also from one that trains no policy."""
        if self.critic is None or planned.known is None:
            return line
        report.doing(f"step {line.step}: the critic learns")
        taught = planned.known.teach(self.critic, self.planner, planned.groups)
        if taught is None:
            return line
        self.critic.save(self.folder)
        return replace(
            line,
            critic_loss=taught.loss,
            explained_variance=taught.explained_variance,
            value_mean=taught.value_mean,
        )

    def _finish_empty(self, plan: StepPlan, line: StepLine, report: RunReport) -> None:
        """The groups are used up without a step, so that they are not read for ever."""
        with self.database.write() as conn:
            finish_step(conn, self.run_id, line.step, to_version=None, metrics=line.as_json())
        report.step(line)
        report.message(f"step {line.step} trains nothing: {plan.counts.why_nothing()}")

    def _hand_over(
        self, trainer: StepTrainer, probe: Probe, line: StepLine, began: float, report: RunReport
    ) -> None:
        """Save the new weights, record the step, and wait until they serve (or not, without `publish`)."""
        report.doing(f"step {line.step}: saving")
        started = time.monotonic()
        moved = probe.after_step(trainer)
        version = self.handover.save(trainer.model, moved, after=self.version, step=line.step)
        line = replace(line, to_version=version.version, save_sec=time.monotonic() - started)
        line = replace(line, seconds=time.monotonic() - began)
        with self.database.write() as conn:
            if self.settings.publish:
                add_candidate(conn, version)
            finish_step(conn, self.run_id, line.step, to_version=version.version, metrics=line.as_json())
        self.version = version.version
        self.steps_trained += 1
        started = time.monotonic()
        try:
            if self.settings.publish:
                name = f"step {line.step}: version {version.version}"
                self.handover.await_verdict(version, lambda status: report.doing(f"{name} is {status}"))
        finally:
            now = time.monotonic()
            report.step(replace(line, publish_sec=now - started, seconds=now - began))
        self.handover.delete_old()

    def _create_folder(self) -> None:
        try:
            (self.folder / "versions").mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"can't create the run folder {self.folder}: {error.strerror}; set --output"
            ) from None


_WAITING = (VersionStatus.CANDIDATE, VersionStatus.LOADING, VersionStatus.PROBING)


def _require_none_waiting(known: Sequence[PolicyVersion]) -> None:
    """A run that starts from the live version would leave out the step of one that is still on its way."""
    for version in known:
        if version.status in _WAITING:
            raise UserError(
                f"version {version.version} of policy {version.policy!r} is still {version.status}: start "
                "the proxy that publishes it and wait, or train with --no-publish"
            )
