"""Training runs that die at a chosen write, or at any moment, and are resumed: in this process, by an
exception that nobody catches, or in one of its own, by SIGKILL."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lightning_rl.settings.train import ResumeSettings, TrainSettings
from lightning_rl.store.database import Database
from lightning_rl.trainer.loop import train
from lightning_rl.trainer.steps import trl_bridge  # noqa: F401 - a forked child has it at once

POINTS = {
    "before the manifest is written": ("trainer.step_loop:add_manifest", "before"),
    "after the manifest, in its transaction": ("trainer.step_loop:add_manifest", "after"),
    "before the step is computed": ("trainer.step_loop:cheapest_batches", "before"),
    "in the step": ("trainer.steps.trl_bridge:RecordedTrainer.compute_loss", "after"),
    "after the optimizer step": ("trainer.step_loop:require_finite", "after"),
    "before the version's folder": ("trainer.version_folders:save_version", "before"),
    "in the version's folder": ("trainer.version_folders:checksum_of", "after"),
    "before the checkpoint": ("trainer.checkpoint:save", "before"),
    "in the checkpoint": ("trainer.steps.training_state:save_state", "after"),
    "after the checkpoint": ("trainer.checkpoint:save", "after"),
    "in the transaction that finishes the step": ("trainer.step_loop:finish_step", "after"),
    "after the step is finished": ("trainer.checkpoint:delete_old", "before"),
    "before the line is printed": ("trainer.report:RunReport.step", "before"),
    "before old versions are deleted": ("trainer.candidate:Handover.delete_old", "before"),
}
"""Where a run can be between two of its writes: a function of the package, and which side of it."""


_END = {"the run ends": ("trainer.loop:end_run", "before")}  # once a run; steps have the others


class Died(BaseException):
    """The process is gone; nobody catches this."""


def die() -> None:
    raise Died


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(point: str, at_call: int, how: Callable[[], None], put: Callable[[Any, str, Any], None]) -> None:
    """Replace the point's function (`put` is a setattr) by one that dies at its n-th call, counted from 1."""
    target, side = (POINTS | _END)[point]
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"lightning_rl.{module_name}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original, count = getattr(owner, name), 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at_call and side == "before":
            how()
        result = original(*args, **kwargs)
        if count == at_call and side == "after":
            how()
        return result

    put(owner, name, deadly)


def interrupt_self() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _child(settings: Mapping[str, Any], resume: str | None, point: str | None, how: str) -> None:
    if point is not None:
        dying(point, 1, {"kill": kill_self, "interrupt": interrupt_self}[how], setattr)
    kind = TrainSettings if resume is None else ResumeSettings
    train(kind.load(None, **settings), resume=resume)


def start(
    settings: Mapping[str, Any], *, resume: str | None = None, point: str | None = None, how: str = "kill"
) -> multiprocessing.process.BaseProcess:
    """A run in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fakes.killed_runs"])
    process = context.Process(target=_child, args=(dict(settings), resume, point, how))
    had = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # else the server finds nothing to import beforehand
    try:
        process.start()
    finally:
        os.environ.pop("PYTHONPATH")
        if had is not None:
            os.environ["PYTHONPATH"] = had
    return process


def final_weights(run_folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest version."""
    newest = max((run_folder / "versions").iterdir(), key=lambda folder: folder.name)
    return {
        name: tensor
        for file in sorted(newest.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def final_state(run_folder: Path) -> dict[str, Any]:
    """Of the newest checkpoint: optimizer and schedule too, and the critic where there is one."""
    newest = max((run_folder / "checkpoints").iterdir(), key=lambda folder: folder.name)
    return {file.name: torch.load(file) for file in sorted(newest.glob("*.pt"))}


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """To the last bit, through dictionaries and lists."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in ours.items():
            assert_equal(value, theirs[name], f"{where}/{name}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}/{i}")
    else:
        assert ours == theirs, where


def assert_same_end(run_folder: Path, reference: Path) -> None:
    weights = final_weights(run_folder)
    assert weights
    assert_equal(weights, final_weights(reference), "weights")
    assert_equal(final_state(run_folder), final_state(reference), "state")


def run_ids(database: Database) -> list[str]:
    import sqlalchemy as sa

    with database.read() as conn:
        return list(conn.execute(sa.text("SELECT id FROM runs ORDER BY created_at_ms, id")).scalars())
