"""What a run leaves beside its versions for people and other programs; the database holds the same.

run.json                what it ran on: every setting as resolved, the environment, where it started
manifests/step-00000/   what each step trained, as a dry run writes it (planning/manifest_files.py)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings.train import TrainSettings
from ..store.commands.tables import count_words
from .place import RunPlace
from .planning.dry_run import decisive_settings
from .planning.manifest_files import WrittenPlan, file_kind, step_folder, write_over
from .planning.plan import StepPlan
from .planning.run_plans import RunPlans

FORMAT = 1
RUN = "run.json"
MANIFESTS = "manifests"


def write_run(
    place: RunPlace, settings: Mapping[str, Any], environment: Mapping[str, Any], *, shown_db: str
) -> None:
    """`settings` without the database's address, whose password is nobody's business; `shown_db` has none."""
    document = {
        "format": FORMAT,
        "run": place.run_id,
        "policy": settings["policy"],
        "start_version": place.version,
        "db": shown_db,
        "settings": dict(settings),
        "environment": dict(environment),
    }
    partial = place.folder / f".{RUN}"
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(partial, place.folder / RUN)
    except OSError as error:
        raise UserError(f"can't write {place.folder / RUN}: {error.strerror}; set --output") from None


def require_no_further(folder: Path, run_id: str, num_finished: int) -> None:
    """UserError where the folder has steps that the log knows nothing of: it went on with another copy of the
    log, and this one would write over them. One step more is what an interruption leaves."""
    beyond = step_folder(folder / MANIFESTS, num_finished + 1)
    if beyond.exists():
        raise UserError(
            f"run {run_id} has gone further than this log, which knows {count_words(num_finished, 'step')} "
            f"of it: there is {beyond}; resume it with the log that it went on with, or begin a new run"
        )


def write_manifest(place: RunPlace, plan: StepPlan, plans: RunPlans, settings: TrainSettings) -> None:
    """The step's manifest, before the step."""
    folder = step_folder(place.folder / MANIFESTS, plan.manifest.step)
    written = plans.written
    kept = WrittenPlan(
        folder=folder,
        policy=plan.manifest.policy,
        start_version=plan.manifest.from_version,
        start_from_base=plan.manifest.from_version == 0,
        settings=decisive_settings(settings, plans.planner) if written is None else written.settings,
        steps=(plan,),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_over(kept, file_kind())
    except OSError as error:
        raise UserError(f"can't write the step's manifest to {folder}: {error.strerror}") from None
