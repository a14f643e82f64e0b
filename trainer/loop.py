"""A training run's frame: what has to be there before it begins, its rows in the log, and how it ends.

What happens in between is step_loop.py's. A crash at any point leaves a usable log and a run that can be
resumed (resume.py), and one run at a time publishes versions of a policy (owner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ..errors import LightningError, OvertakenError, SettingsError, UserError
from ..records import PolicyVersion, VersionStatus, new_id
from ..settings.train import TrainSettings
from ..store.commands.tables import count_words
from ..store.database import Database
from ..store.policies import WAITING, live_version, load_version, versions
from ..store.run_owners import OwnedRun, Owner, give_up, hold, latest_run, publishing_run, take
from ..store.runs import create_run, end_run, steps_of
from .launch import require_supported
from .owner import Ownership, lives, this_process, where
from .place import RunPlace
from .planning.planner import plan_settings
from .planning.run_plans import RunPlans
from .process import environment, signals_interrupt
from .report import RunReport, figures, mend_log
from .resume import Resumption, find, resumption
from .run_folder import write_run
from .step_loop import StepLoop
from .steps import models
from .steps.adapters import require_its_shape
from .steps.making import build_trainer
from .steps.trackers import require_trackers


@dataclass(frozen=True, slots=True)
class RunSummary:
    run_id: str
    status: str  # "finished" | "stopped"
    steps_trained: int
    version: int  # of the last weights
    folder: Path


def train(
    settings: TrainSettings, *, resume: str | None = None, fresh: bool = False, as_json: bool = False
) -> RunSummary:
    """Run to the end of what there is, for ever with `watch`, or until SIGINT or SIGTERM.

    `resume`: a run's id or `latest`; only the settings that were given with it are looked at (resume.py).
    `fresh`: an interrupted run of the policy is given up.
    """
    database = Database.open(settings.db, must_exist=not settings.watch)
    try:
        run = None if resume is None else find(database, resume, settings)
        if run is not None:
            resumed = resumption(database, run, settings)
            require_trackers(resumed.settings.report_to)
            return TrainingRun(database, resumed.settings, resumed).run(as_json=as_json)
        if "model" not in settings.model_fields_set:
            raise SettingsError(
                f"no run of policy {settings.policy!r} to resume, and a new one needs --model"
            )
        models.check_folder(settings.model)
        plan_settings(settings)
        require_trackers(settings.report_to)
        if settings.share_gpu and not settings.publish:
            raise SettingsError(
                "--share-gpu asks the proxy that publishes; it can't be used with --no-publish"
            )
        return TrainingRun(database, settings, fresh=fresh).run(as_json=as_json)
    finally:
        database.close()


class TrainingRun:
    def __init__(
        self,
        database: Database,
        settings: TrainSettings,
        resumed: Resumption | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self._database, self._settings, self._resumed, self._fresh = database, settings, resumed, fresh
        with database.read() as conn:
            if settings.publish:
                _require_no_other_run(conn, settings.policy, resumed, fresh=fresh)
            if resumed is None and settings.publish:
                _require_none_waiting(versions(conn, settings.policy))
            live = None if resumed is not None else live_version(conn, settings.policy)
        if resumed is None:
            run_id = new_id()
            self._start = models.start_weights(settings, live)
            if self._start.adapter is not None:
                require_its_shape(settings, self._start.adapter)
            self._place = RunPlace(run_id, settings.output.resolve() / run_id, self._start.version)
        else:
            self._start, self._place = resumed.start, resumed.place
        began = resumed.run.start_version if resumed is not None else None
        self._plans = RunPlans(
            database,
            settings,
            self._place,
            start_version=self._start.version if began is None else began,
            unfinished=None if resumed is None else resumed.unfinished,
        )

    def run(self, *, as_json: bool) -> RunSummary:
        if self._resumed is None and not self._settings.watch:
            self._plans.require_something()
        require_supported(has_critic=self._plans.planner.reads_values)
        on_gpu = models.use_device(self._settings)
        tokenizer = models.load_tokenizer(self._settings.model)
        place, owner = self._place, this_process()
        with signals_interrupt():
            report = RunReport(place.folder, as_json=as_json, progress=self._settings.progress)
            status, why = "failed", None
            try:
                before = self._begin(owner, on_gpu)
                with report, Ownership(self._database, place.run_id, owner) as ownership:
                    if before is not None:
                        report.message(before)
                    self._take_steps(report, ownership, tokenizer, on_gpu=on_gpu)
                status = "finished"
            except OvertakenError as error:
                status, why = "stopped", str(error)
                raise
            except LightningError as error:
                why = str(error)
                raise
            except KeyboardInterrupt:
                status = "stopped"
            finally:
                was_ours = self._end(owner, status, why)
            if status == "stopped":
                if not was_ours:
                    raise KeyboardInterrupt  # before the run had begun
                report.message(
                    f"stopped after {count_words(place.steps_trained, 'step')}; the log and every version "
                    f"are whole; go on with: lightning train --resume {place.run_id}"
                )
        return RunSummary(place.run_id, status, place.steps_trained, place.version, place.folder)

    def _take_steps(self, report: RunReport, ownership: Ownership, tokenizer: Any, *, on_gpu: bool) -> None:
        with models.one_line_for_full_memory():
            report.doing("loading the model")
            trainer = build_trainer(self._settings, self._start, tokenizer, self._place.folder, on_gpu)
            loop = StepLoop(
                self._database,
                self._settings,
                self._place,
                self._plans,
                trainer=trainer,
                start=self._start,
                report=report,
                ownership=ownership,
                resumed=self._resumed,
            )
            trainer.steps = loop.steps(tokenizer)
            report.on_step = lambda line: trainer.log_figures(figures(line))
            trainer.train()

    def _begin(self, owner: Owner, on_gpu: bool) -> str | None:
        """The run is this process's from now on; a line about what was before it, if that has to be said."""
        resumed, policy = self._resumed, self._settings.policy if self._settings.publish else None
        facts = environment(on_gpu) | {"model": models.fingerprint(self._settings.model)}
        if resumed is not None:
            was = resumed.run.owner.token if resumed.run.owner is not None else None
            with self._database.write() as conn:
                take(conn, self._place.run_id, owner, was=was, policy=policy)
            mend_log(self._place.folder, resumed.lines)
            return _resumed_line(resumed, facts)
        _create_folder(self._place.folder)
        settings = self._stored_settings()
        write_run(self._place, settings, facts, shown_db=self._database.shown_url)
        with self._database.write() as conn:
            before = None
            if policy is not None:
                before = _interrupted_line(conn, policy)
                _require_no_other_run(conn, policy, None, fresh=self._fresh)
                if self._fresh:
                    _give_up_other_run(conn, policy)
            create_run(
                conn,
                self._place.run_id,
                self._settings.policy,
                settings,
                facts,
                self._start.version,
            )
            take(conn, self._place.run_id, owner, was=None, policy=policy)
        return before

    def _stored_settings(self) -> dict[str, object]:
        """With whole paths: a run is resumed from anywhere."""
        settings, written = self._settings, self._plans.written
        paths = {name: str(getattr(settings, name).resolve()) for name in ("model", "output")}
        if settings.accelerate is not None:
            paths["accelerate"] = str(settings.accelerate.resolve())
        stored = settings.model_dump(mode="json", exclude={"db"}) | paths
        if written is None:
            return stored
        return (
            stored
            | {**written.settings, "max_steps": settings.max_steps}
            | {"manifests": str(written.folder.resolve())}
        )

    def _end(self, owner: Owner, status: str, why: str | None) -> bool:
        """False: it is another process's by now, or was never begun."""
        with self._database.write() as conn:
            is_ours = hold(conn, self._place.run_id, owner.token)
            if is_ours:
                end_run(conn, self._place.run_id, status, why)
        return is_ours


def _require_no_other_run(
    conn: sa.Connection, policy: str, resumed: Resumption | None, *, fresh: bool
) -> None:
    """One run at a time publishes versions of a policy, and an interrupted one is not passed over unseen."""
    other = publishing_run(conn, policy)
    if other is None or (resumed is not None and other.id == resumed.run.id):
        return
    if lives(other):
        raise UserError(
            f"run {other.id} is training policy {policy!r} at this moment ({where(other)}): one run at a "
            "time publishes its versions; end that one, or train with --no-publish"
        )
    if not fresh:
        done = count_words(sum(step.to_version is not None for step in steps_of(conn, other.id)), "step")
        raise UserError(
            f"run {other.id} of policy {policy!r} was interrupted after {done}: go on with it "
            f"(--resume {other.id}), or give it up and begin anew from the live version (--fresh)"
        )


def _give_up_other_run(conn: sa.Connection, policy: str) -> None:
    other = publishing_run(conn, policy)
    if other is not None:
        give_up(conn, other.id, None if other.owner is None else other.owner.token)


def _interrupted_line(conn: sa.Connection, policy: str) -> str | None:
    """What a new run tells of the one before it, if that did not come to its end."""
    last = latest_run(conn, policy)
    if last is None or last.status == "finished" or not last.settings.get("publish"):
        return None
    if last.start_version is None:
        return None
    what = "was interrupted" if last.status == "running" else last.status
    rejected = _rejected_version(conn, last)
    if rejected is not None:
        end = f"its version {rejected} was rejected"
    else:
        end = f"lightning train --resume {last.id} would have gone on with it"
    return (
        f"run {last.id} before this one {what}; this run begins anew from the live version and trains what "
        f"that one has not ({end})"
    )


def _rejected_version(conn: sa.Connection, run: OwnedRun) -> int | None:
    """The run's newest version, if it was rejected: then there is nothing to go on from."""
    made = [step.to_version for step in steps_of(conn, run.id) if step.to_version is not None]
    newest = load_version(conn, run.policy, made[-1]) if made else None
    is_rejected = newest is not None and newest.status is VersionStatus.REJECTED
    return made[-1] if is_rejected else None


def _resumed_line(resumed: Resumption, facts: dict[str, str]) -> str:
    was = resumed.run.environment
    changed = [f"{name} {was[name]} is {facts.get(name)} now" for name in was if was[name] != facts.get(name)]
    unlike = f"; not to the last digit: {', '.join(changed)}" if changed else ""
    done = count_words(resumed.place.steps_trained, "step")
    return f"run {resumed.run.id} goes on after {done}{unlike}"


def _create_folder(folder: Path) -> None:
    try:
        (folder / "versions").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"can't create the run folder {folder}: {error.strerror}; set --output") from None


def _require_none_waiting(known: Sequence[PolicyVersion]) -> None:
    """A run that starts from the live version would leave out the step of one that is still on its way."""
    for version in known:
        if version.status in WAITING:
            raise UserError(
                f"version {version.version} of policy {version.policy!r} is still {version.status}: start "
                "the proxy that publishes it and wait, or train with --no-publish"
            )
