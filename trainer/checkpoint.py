"""Checkpoints: what a run needs to go on exactly, one folder per finished step, whole or not there.

    checkpoints/00003/checkpoint.json    which run, step and version it is of
                      state.pt           trained weights, optimizer, schedule, random states
                      critic.pt          where the run has a critic
                      adapter/           LoRA: the shape of the adapter

Which of them counts is the database's word: the newest step that it calls finished. The folder is there
before that is written, and the one before it stays, so that a machine that loses its last commit can go on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from .whole_folder import whole_folder

FOLDER = "checkpoints"
ADAPTER = "adapter"
_HEADER = "checkpoint.json"
_FORMAT = 1
_KEPT = 2


def save(run_folder: Path, run_id: str, step: int, write: Callable[[Path], None]) -> None:
    """`write` puts the state's files into the folder that it is given."""
    folder = _place(run_folder, step)
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt at this step that was interrupted
    try:
        with whole_folder(folder) as partial:
            write(partial)
            (partial / _HEADER).write_text(json.dumps({"format": _FORMAT, "run": run_id, "step": step}))
    except OSError as error:
        raise UserError(f"can't write checkpoint {folder}: {error.strerror or error}") from None


def find(run_folder: Path, run_id: str, step: int) -> Path:
    """UserError where the step's checkpoint is not there, or is another's."""
    folder = _place(run_folder, step)
    try:
        header = json.loads((folder / _HEADER).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"the checkpoint of step {step} of run {run_id} is missing: no {folder}; if the run folder was "
            "moved, name the folder that it is in with --output, else start a new run (--fresh)"
        ) from None
    if header != {"format": _FORMAT, "run": run_id, "step": step}:
        raise UserError(f"{folder} is not step {step} of run {run_id}: {json.dumps(header)[:200]}")
    return folder


def share(run_folder: Path, step: int, name: str) -> None:
    """A file of the step's checkpoint becomes the run folder's, which other runs read; no second copy."""
    partial = run_folder / f".{name}"
    partial.unlink(missing_ok=True)
    file = _place(run_folder, step) / name
    try:
        os.link(file, partial)
    except OSError:  # a file system without links
        shutil.copyfile(file, partial)
    partial.replace(run_folder / name)


def delete_old(run_folder: Path) -> None:
    """All but the newest ones; the step of the newest has been finished."""
    if not (run_folder / FOLDER).is_dir():  # steps that trained nothing need none
        return
    known = sorted(folder for folder in (run_folder / FOLDER).iterdir() if folder.name.isdigit())
    for folder in known[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def delete_after(run_folder: Path, step: int | None) -> None:
    """Those of steps that were not finished, and what is left of interrupted writes."""
    if not (run_folder / FOLDER).is_dir():
        return
    for folder in (run_folder / FOLDER).iterdir():
        if not folder.name.isdigit() or step is None or int(folder.name) > step:
            shutil.rmtree(folder, ignore_errors=True)


def _place(run_folder: Path, step: int) -> Path:
    return run_folder / FOLDER / f"{step:05d}"
