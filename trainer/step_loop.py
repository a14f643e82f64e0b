"""Step after step: manifest -> optimizer step -> version folder -> candidate -> verdict, and the next.

Everything that the log has to know is written before it happens (the manifest) or with what it belongs to
(candidate row and finished step in one transaction). The loop is a generator of micro-batches that the
trainer asks for the next step: its loss, optimizer and schedule are the bridge's matter, and so is everything
about torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..records import PolicyVersion, Transition
from ..settings.train import TrainSettings
from ..store.database import Database
from ..store.runs import add_manifest, finish_step
from . import checkpoint
from .batches.packing import MicroBatch, cheapest_batches
from .candidate import Handover, Probe
from .owner import Ownership
from .place import RunPlace
from .planning.plan import StepPlan, transitions
from .planning.run_plans import Planned, RunPlans
from .planning.unmet import Met
from .report import RunReport, StepLine
from .rest import EngineRest
from .resume import Resumption
from .run_folder import write_manifest
from .step_figures import (
    correction_of,
    gap_notice,
    lags_behind,
    measured,
    require_finite,
    require_finite_critic,
    rounding_notice,
    timed,
)
from .steps import models
from .steps.step_trainer import StepTrainer
from .steps.values import CRITIC_FILE, Valuer
from .version_folders import write_adapter


class KeptValuer(Valuer, Protocol):
    """What a run needs of critic.Critic."""

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class StepLoop:
    """The steps of one run, with the weights loaded."""

    def __init__(
        self,
        database: Database,
        settings: TrainSettings,
        place: RunPlace,
        plans: RunPlans,
        *,
        trainer: StepTrainer,
        start: models.StartWeights,
        report: RunReport,
        ownership: Ownership,
        resumed: Resumption | None = None,
    ) -> None:
        self._database, self._settings, self._place, self._plans = database, settings, place, plans
        self._trainer, self._report = trainer, report
        self._start, self._ownership, self._resumed = start, ownership, resumed
        starts_anew = settings.from_base and place.version == 0
        self._handover = Handover(
            database,
            settings,
            place.run_id,
            place.folder / "versions",
            serves=None if starts_anew else place.version,
        )
        plans.while_waiting = self._handover.require_current
        self._shape = trainer.shape
        self._max_tokens = models.token_budget(settings, trainer.model.device.type)
        if self._shape.note is not None:
            report.message(self._shape.note)
        self._rest = EngineRest(database, settings, place.run_id)
        self._warned_of: set[str] = set()
        self._critic: KeptValuer | None = None

    def steps(self, tokenizer: Any) -> Iterator[Sequence[MicroBatch]]:
        """The generator that the trainer pulls: after each `yield` the optimizer step has been taken."""
        if self._plans.planner.reads_values:
            self._critic = models.load_critic(self._settings, self._start, self._trainer.model, self._shape)
        if self._resumed is not None:
            self._resume(self._resumed)
        if self._has_enough_steps():
            return
        model = self._settings.model
        num_embeddings = self._trainer.model.get_input_embeddings().weight.shape[0]
        check_engines = partial(models.check_tokenizer, tokenizer, folder=model)
        for planned in self._plans.each(self._report, self._critic, check_engines):
            yield from self._step(planned, num_embeddings)
            if self._has_enough_steps():
                return

    def _has_enough_steps(self) -> bool:
        most = self._settings.max_steps
        return most is not None and self._place.steps_trained >= most

    def _resume(self, resumed: Resumption) -> None:
        """Be where the run was when it had finished its last step, to the last bit."""
        self._handover.forget_unfinished(resumed.versions_made)
        checkpoint.delete_after(self._place.folder, resumed.checkpoint_step)
        if resumed.waiting is not None:
            self._await_verdict(resumed.waiting)
        if resumed.checkpoint is not None:
            self._trainer.load_state(resumed.checkpoint)
            if self._critic is not None:
                self._critic.load(resumed.checkpoint)

    def _step(self, planned: Planned, num_embeddings: int) -> Iterator[Sequence[MicroBatch]]:
        """From the manifest to the verdict; nothing is yielded where there is nothing to train."""
        self._handover.require_current()
        began = time.monotonic()
        plan = planned.plan
        trained = transitions(plan.manifest, planned.groups)
        models.check_ids(trained, num_embeddings, self._settings.model)
        if not planned.is_in_log:
            with self._database.write() as conn:
                self._ownership.vouch(conn)
                add_manifest(conn, plan.manifest, asdict(plan.counts))
        write_manifest(self._place, plan, self._plans, self._settings)
        self._place.steps_planned += 1
        line = StepLine.counted(plan.counts, step=plan.manifest.step, from_version=self._place.version)
        if plan.manifest.step == 0 and self._plans.written is None:
            self._tell_of_unmet(planned)
        if not plan.trains:
            self._finish_empty(plan, self._teach(planned, line))
            return
        self._rest.begin(self._report.doing)
        try:
            yield from self._computed(planned, trained, line, began)
        finally:
            self._rest.end()

    def _computed(
        self, planned: Planned, trained: Sequence[Transition], line: StepLine, began: float
    ) -> Iterator[Sequence[MicroBatch]]:
        """The part of a step that needs the GPU, and the hand-over."""
        plan = planned.plan
        probe = Probe.before_step(self._trainer, trained, self._max_tokens)
        batches = cheapest_batches(trained, self._max_tokens, self._shape, self._trainer.num_ranks)
        share = self._trainer.share(batches)
        self._trainer.on_micro_batch = partial(self._report.doing, f"step {line.step}")
        started = time.monotonic()
        mode = correction_of(self._settings, plan.manifest, planned.groups)
        if mode != "off":
            share = self._trainer.corrected(share, mode, self._settings.correction_cap)
        for epoch in range(self._settings.epochs):
            yield share
            require_finite(self._trainer.metrics, line.step)
            if epoch == 0:
                line = measured(line, self._trainer.metrics, len(batches))
                self._warn(line, planned)
        line = timed(line, time.monotonic() - started)
        self._hand_over(probe, self._teach(planned, line), began)

    def _warn(self, line: StepLine, planned: Planned) -> None:
        """Once a run of each kind: its other steps would say the same."""
        lags = lags_behind(planned.plan.manifest, planned.groups)
        for kind, notice in (
            ("rounding", rounding_notice(line, self._settings)),
            ("gap", gap_notice(line, lags=lags)),
        ):
            if notice is not None and kind not in self._warned_of:
                self._report.message(notice)
                self._warned_of.add(kind)

    def _tell_of_unmet(self, planned: Planned) -> None:
        """Once a run: its other steps may well have what the first one has not."""
        met = Met()
        met.add(planned.groups)
        for notice in met.notices(self._plans.planner.settings, f"step {planned.plan.manifest.step}"):
            self._report.message(notice)

    def _teach(self, planned: Planned, line: StepLine) -> StepLine:
        """The critic learns from every step, also from one that trains no policy."""
        if self._critic is None or planned.known is None:
            return line
        self._report.doing(f"step {line.step}: the critic learns")
        taught = planned.known.teach(self._critic, self._plans.planner, planned.groups)
        if taught is None:
            return line
        require_finite_critic(taught, line.step)
        return replace(
            line,
            critic_loss=taught.loss,
            explained_variance=taught.explained_variance,
            value_mean=taught.value_mean,
        )

    def _finish_empty(self, plan: StepPlan, line: StepLine) -> None:
        """The groups are used up without a step, so that they are not read for ever."""
        if self._critic is not None:
            self._save_checkpoint(line.step)
        with self._database.write() as conn:
            self._ownership.vouch(conn)
            finish_step(conn, self._place.run_id, line.step, to_version=None, metrics=line.as_json())
        self._tidy_checkpoints(line.step)
        self._report.step(line)
        self._report.message(f"step {line.step} trains nothing: {plan.counts.why_nothing()}")

    def _hand_over(self, probe: Probe, line: StepLine, began: float) -> None:
        """Save the new weights, record the step, and wait until they serve (or not, without `publish`)."""
        report, place = self._report, self._place
        report.doing(f"step {line.step}: saving")
        started = time.monotonic()
        moved = probe.after_step(self._trainer)
        gathered = self._trainer.gathered()
        version = self._handover.save(
            self._trainer.model, moved, after=place.version, step=line.step, gathered=gathered
        )
        self._save_checkpoint(line.step, gathered)
        line = replace(line, to_version=version.version, save_sec=time.monotonic() - started)
        line = replace(line, seconds=time.monotonic() - began)
        if self._settings.share_gpu:
            models.empty_cache()
        with self._database.write() as conn:
            self._ownership.vouch(conn)
            if self._settings.publish:
                self._handover.offer(conn, version)
            self._rest.end_in(conn)
            finish_step(conn, place.run_id, line.step, to_version=version.version, metrics=line.as_json())
        place.version = version.version
        place.steps_trained += 1
        self._tidy_checkpoints(line.step)
        started = time.monotonic()
        try:
            if self._settings.publish:
                self._await_verdict(version)
        finally:
            now = time.monotonic()
            report.step(replace(line, publish_sec=now - started, seconds=now - began))
        self._handover.delete_old()

    def _await_verdict(self, version: PolicyVersion) -> None:
        name = f"step {version.step}: version {version.version}"
        self._handover.await_verdict(version, lambda status: self._report.doing(f"{name} is {status}"))

    def _save_checkpoint(self, step: int, gathered: dict[str, Any] | None = None) -> None:
        """Before the step is called finished: whatever happens then, there is one to go on from."""

        def write(folder: Path) -> None:
            self._trainer.save_state(folder)
            if self._critic is not None:
                self._critic.save(folder)
            if self._settings.weights == "lora":
                write_adapter(
                    self._trainer.model, folder / checkpoint.ADAPTER, self._settings.model, gathered
                )

        checkpoint.save(self._place.folder, self._place.run_id, step, write)

    def _tidy_checkpoints(self, step: int) -> None:
        """The step is finished: its critic is the run's, and the checkpoints of long ago may go."""
        if self._critic is not None:
            checkpoint.share(self._place.folder, step, CRITIC_FILE)
        checkpoint.delete_old(self._place.folder)
