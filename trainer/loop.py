"""A training run's frame: what has to be there before it begins, its rows in the log, and how it ends.

What happens in between is step_loop.py's. Ctrl-C or a crash at any point leaves a usable database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..records import PolicyVersion, VersionStatus, new_id
from ..settings import TrainSettings
from ..store.database import Database
from ..store.policies import live_version, versions
from ..store.runs import create_run, end_run
from .place import RunPlace
from .planning.planner import plan_settings
from .planning.run_plans import RunPlans
from .process import environment, sigterm_interrupts
from .report import RunReport, figures
from .run_folder import write_run
from .step_loop import StepLoop
from .steps import models
from .steps.step_trainer import build_trainer
from .steps.trackers import require_trackers


@dataclass(frozen=True, slots=True)
class RunSummary:
    run_id: str
    status: str  # "finished" | "stopped"
    steps_trained: int
    version: int  # of the last weights
    folder: Path


def train(settings: TrainSettings, *, as_json: bool = False) -> RunSummary:
    """Run to the end of what there is, for ever with `watch`, or until SIGINT or SIGTERM."""
    models.check_folder(settings.model)
    plan_settings(settings)
    require_trackers(settings.report_to)
    database = Database.open(settings.db, must_exist=not settings.watch)
    try:
        return TrainingRun(database, settings).run(as_json=as_json)
    finally:
        database.close()


class TrainingRun:
    def __init__(self, database: Database, settings: TrainSettings) -> None:
        self._database, self._settings = database, settings
        with database.read() as conn:
            if settings.publish:
                _require_none_waiting(versions(conn, settings.policy))
            self._start = models.start_weights(settings, live_version(conn, settings.policy))
        run_id = new_id()
        self._place = RunPlace(run_id, settings.output.resolve() / run_id, self._start.version)
        self._plans = RunPlans(database, settings, self._place)

    def run(self, *, as_json: bool) -> RunSummary:
        if not self._settings.watch:
            self._plans.require_something()
        on_gpu = models.use_device(self._settings)
        tokenizer = models.load_tokenizer(self._settings.model)
        place = self._place
        _create_folder(place.folder)
        self._create_row(on_gpu)
        status = "failed"
        with RunReport(place.folder, as_json=as_json, progress=self._settings.progress) as report:
            try:
                with sigterm_interrupts(), models.one_line_for_full_memory():
                    report.doing("loading the model")
                    trainer = build_trainer(self._settings, self._start, tokenizer, place.folder, on_gpu)
                    loop = StepLoop(
                        self._database,
                        self._settings,
                        place,
                        self._plans,
                        trainer=trainer,
                        start=self._start,
                        report=report,
                    )
                    trainer.steps = loop.steps(tokenizer)
                    report.on_step = lambda line: trainer.log_figures(figures(line))
                    trainer.train()
                status = "finished"
            except KeyboardInterrupt:
                status = "stopped"
                report.message(
                    f"stopped after {place.steps_trained} steps; the log and every version are whole"
                )
            finally:
                with self._database.write() as conn:
                    end_run(conn, place.run_id, status)
        return RunSummary(place.run_id, status, place.steps_trained, place.version, place.folder)

    def _create_row(self, on_gpu: bool) -> None:
        written = self._plans.written
        settings = self._settings.model_dump(mode="json", exclude={"db"})
        settings |= {} if written is None else written.settings
        found = environment(on_gpu)
        write_run(self._place, settings, found, shown_db=self._database.shown_url)
        with self._database.write() as conn:
            create_run(conn, self._place.run_id, self._settings.policy, settings, found)


def _create_folder(folder: Path) -> None:
    try:
        (folder / "versions").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"can't create the run folder {folder}: {error.strerror}; set --output") from None


_WAITING = (VersionStatus.CANDIDATE, VersionStatus.LOADING, VersionStatus.PROBING)


def _require_none_waiting(known: Sequence[PolicyVersion]) -> None:
    """A run that starts from the live version would leave out the step of one that is still on its way."""
    for version in known:
        if version.status in _WAITING:
            raise UserError(
                f"version {version.version} of policy {version.policy!r} is still {version.status}: start "
                "the proxy that publishes it and wait, or train with --no-publish"
            )
