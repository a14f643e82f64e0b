"""Going on with a run that was interrupted: which one, whether that can be, and from where exactly.

The database decides. A step that it calls finished has its checkpoint in the run folder; one whose manifest
was written and not trained is trained as it was written; a version that waits for its verdict is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ..errors import ModelMismatchError, SettingsError, UserError
from ..records import PolicyVersion, VersionStatus
from ..settings.train import TrainSettings
from ..store.database import Database
from ..store.policies import WAITING, load_version, versions
from ..store.run_owners import OwnedRun, latest_run, owned_run
from ..store.run_view import find_run
from ..store.runs import WrittenStep, steps_of
from . import checkpoint
from .owner import lives, where
from .place import RunPlace
from .planning.planner import plan_settings
from .planning.run_plans import Unfinished
from .run_folder import require_no_further
from .steps import models

LATEST = "latest"

HARMLESS = frozenset(
    {"db", "output", "watch", "publish_timeout_sec", "keep_versions", "progress", "report_to"}
    | {"processes", "accelerate", "rank_timeout_sec"}
)
"""Settings that change no digit of what is trained (another number of processes sums in another order, and is
told). `max_steps` joins them where no schedule counts to it."""


@dataclass(frozen=True, slots=True)
class Resumption:
    run: OwnedRun
    settings: TrainSettings
    place: RunPlace
    start: models.StartWeights  # what the trainer is made from; the checkpoint's weights replace its own
    checkpoint: Path | None  # None: nothing has been learnt yet
    checkpoint_step: int | None
    unfinished: Unfinished | None
    waiting: PolicyVersion | None  # the run's newest version, which has no verdict yet
    versions_made: frozenset[int]
    lines: tuple[Mapping[str, Any], ...]  # of the finished steps, in order


def find(database: Database, name: str, given: TrainSettings) -> OwnedRun | None:
    """The run of that id, or the policy's latest. None: `latest`, and there is none (watching: none that has
    not finished), so that a service begins anew."""
    with database.read() as conn:
        if name == LATEST:
            run = latest_run(conn, given.policy)
            if run is None or (run.status == "finished" and given.watch):
                return None
        else:
            run = owned_run(conn, find_run(conn, name))
            assert run is not None, "find_run has found it"
    if run.status == "finished":
        raise UserError(
            f"run {run.id} is finished: there is nothing to resume; lightning train begins a new one from "
            "the live version"
        )
    if lives(run):
        raise UserError(f"run {run.id} is being trained at this moment, by {where(run)}: end that first")
    if run.start_version is None:
        raise UserError(
            f"run {run.id} was begun by an older version of lightning, which kept no checkpoints: begin a "
            "new one from the live version"
        )
    return run


def resumption(database: Database, run: OwnedRun, given: TrainSettings) -> Resumption:
    """UserError, in one line, where the run can't go on exactly."""
    settings = settings_of(run, given)
    _require_model(run, settings)
    folder = settings.output.resolve() / run.id
    with database.read() as conn:
        steps = steps_of(conn, run.id)
        finished = [step for step in steps if step.trained_at_ms is not None]
        require_no_further(folder, run.id, len(finished))
        made = [step.to_version for step in finished if step.to_version is not None]
        assert run.start_version is not None, "find has looked"
        version = made[-1] if made else run.start_version
        waiting = _own_newest(conn, run, settings, made) if settings.publish else None
        step = _step_of_checkpoint(finished, settings)
        place_of_it = None if step is None else checkpoint.find(folder, run.id, step)
        place = RunPlace(run.id, folder, version, len(finished), len(made))
        return Resumption(
            run=run,
            settings=settings,
            place=place,
            start=_start(conn, run, settings, place_of_it, version),
            checkpoint=place_of_it,
            checkpoint_step=step,
            unfinished=_unfinished(conn, run, steps),
            waiting=waiting,
            versions_made=frozenset(made),
            lines=tuple(step.metrics for step in finished if step.metrics is not None),
        )


def settings_of(run: OwnedRun, given: TrainSettings) -> TrainSettings:
    """The run's own, with what may change. SettingsError for one that would change what is trained."""
    stored = dict(run.settings)
    said = given.model_dump(mode="json")
    if given.manifests is not None:
        said["manifests"] = str(given.manifests.resolve())  # as it is stored
    harmless = HARMLESS | ({"max_steps"} if stored.get("lr_schedule", "constant") == "constant" else set())
    changes: dict[str, Any] = {"db": given.db}
    for name in sorted(given.model_fields_set):
        if name in harmless or name == "model":
            changes[name] = said[name]
        elif said[name] != stored.get(name) and not (stored.get("manifests") and name in _OF_A_PLAN):
            raise SettingsError(
                f"run {run.id} was begun with {name} = {stored.get(name)}, and {said[name]} would change "
                f"what it trains: leave --{name.replace('_', '-')} out, or begin a new run"
            )
    if "output" in changes and not (Path(changes["output"]).resolve() / run.id).is_dir():
        del changes["output"]  # a service's setting, from another working folder
    return TrainSettings.load(None, **(stored | changes))


_OF_A_PLAN = frozenset({"credit", "sources"})
"""A run of written manifests keeps what decided them, in full, which need not be spelled as it was given."""


def _require_model(run: OwnedRun, settings: TrainSettings) -> None:
    models.check_folder(settings.model)
    was = run.environment.get("model")
    if was is not None and models.fingerprint(settings.model) != was:
        raise ModelMismatchError(
            f"{settings.model} is not the model that run {run.id} was begun with: give --model the folder "
            "that it was"
        )


def _own_newest(
    conn: sa.Connection, run: OwnedRun, settings: TrainSettings, made: Sequence[int]
) -> PolicyVersion | None:
    """The run's newest version, if it still waits. UserError unless it is live, or is about to be."""
    known = {version.version: version for version in versions(conn, settings.policy)}
    live = next((v.version for v in known.values() if v.status is VersionStatus.LIVE), 0)
    newest = made[-1] if made else None
    others = [v for v in known.values() if v.status in WAITING and v.version != newest]
    if others:
        raise UserError(
            f"version {others[0].version} of policy {settings.policy!r} is {others[0].status}, which run "
            f"{run.id} did not make last: wait for its verdict, then begin a new run"
        )
    if not made:
        if not settings.from_base and live != run.start_version:
            raise UserError(_not_ours(run, live, f"version {run.start_version}, which it began from"))
        return None
    own = known.get(made[-1])
    if own is None:
        raise UserError(f"version {made[-1]} of run {run.id} is not in the log any more: begin a new run")
    if own.status is VersionStatus.REJECTED:
        why = (own.verdict or {}).get("reason") or "no reason given"
        raise UserError(
            f"version {own.version} of run {run.id} was rejected ({why}), so the run can't go on from it: "
            "begin a new one from the live version"
        )
    if own.status in WAITING:
        return own
    if own.status is not VersionStatus.LIVE:
        raise UserError(_not_ours(run, live, f"its own version {own.version}"))
    return None


def _not_ours(run: OwnedRun, live: int, own: str) -> str:
    now = f"version {live} is live" if live else "no version is live"
    return (
        f"{now}, and run {run.id} would go on from {own}: somebody has promoted or rolled back since; make "
        "that one live again, or begin a new run"
    )


def _step_of_checkpoint(finished: Sequence[WrittenStep], settings: TrainSettings) -> int | None:
    """The newest finished step that has changed anything: weights or, from every step, a critic."""
    has_critic = "values" in plan_settings(settings).credit.reads
    changed = [step.step for step in finished if has_critic or step.to_version is not None]
    return changed[-1] if changed else None


def _start(
    conn: sa.Connection, run: OwnedRun, settings: TrainSettings, found: Path | None, version: int
) -> models.StartWeights:
    if found is None:
        began = load_version(conn, settings.policy, version) if version else None
        if version and began is None:
            raise UserError(f"version {version}, which run {run.id} began from, is not in the log any more")
        return models.start_weights(settings, began)
    adapter = found / checkpoint.ADAPTER if settings.weights == "lora" else None
    return models.StartWeights(version, settings.model, adapter)


def _unfinished(conn: sa.Connection, run: OwnedRun, steps: Sequence[WrittenStep]) -> Unfinished | None:
    open_steps = [step for step in steps if step.trained_at_ms is None]
    assert len(open_steps) <= 1, "the next manifest is written after a step was finished"
    return Unfinished.load(conn, run.id, open_steps[0]) if open_steps else None
