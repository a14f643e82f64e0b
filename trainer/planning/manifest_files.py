"""Step manifests as files: what dry runs and runs write, and `lightning train --manifests FOLDER` reads.

    plan.json                             what planned it, and the counts of every step
    choices.parquet    (or .jsonl)        one row per choice: step, ids, agent, advantage, multiplier, why
    episodes.parquet   (or .jsonl)        one row per episode: step, group, value, its reward rows

A run keeps a folder of this kind for each of its steps (`manifests/step-00000`, …); the folder above them is
read as one plan. Parquet where pyarrow is installed, JSON lines elsewhere. Numbers come back as they went, to
the last digit.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ...errors import UserError
from ...records import ManifestChoice, StepManifest
from ..reasons import in_words
from .plan import StepCounts, StepPlan

FORMAT = 1
PLAN = "plan.json"
FileKind = Literal["parquet", "jsonl"]

_CHOICE_TYPES = {
    "step": "int64",
    "call_id": "string",
    "choice_index": "int64",
    "episode_id": "string",
    "group_id": "string",
    "agent": "string",
    "advantage": "double",
    "multiplier": "double",
    "reason": "string",
    "why": "string",
}
_EPISODE_TYPES = {
    "step": "int64",
    "episode_id": "string",
    "group_id": "string",
    "value": "double",
    "reward_ids": "list",
}


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A dry run as it was written."""

    folder: Path
    policy: str
    start_version: int
    start_from_base: bool
    settings: Mapping[str, Any]  # those that decide what is trained
    steps: tuple[StepPlan, ...]


def file_kind() -> FileKind:
    return "parquet" if find_spec("pyarrow") is not None else "jsonl"


def write_plan(plan: WrittenPlan, kind: FileKind) -> None:
    """Into a new or empty folder, or over an earlier dry run. UserError for any other folder."""
    folder = plan.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / PLAN).is_file():
            raise UserError(f"{folder} holds something that is no dry run; name another folder (--manifests)")
        write_over(plan, kind)
    except OSError as error:
        raise UserError(f"can't write the dry run to {folder}: {error.strerror}; set --manifests") from None


def write_over(plan: WrittenPlan, kind: FileKind) -> None:
    """Into the plan's folder, which is there, over any earlier plan. OSError where that fails."""
    folder = plan.folder
    (folder / PLAN).unlink(missing_ok=True)
    for name in ("choices", "episodes"):
        for old in ("parquet", "jsonl"):
            (folder / f"{name}.{old}").unlink(missing_ok=True)
    manifests = [step.manifest for step in plan.steps]
    _write(folder / f"choices.{kind}", [row for m in manifests for row in _choice_rows(m)], _CHOICE_TYPES)
    _write(folder / f"episodes.{kind}", [row for m in manifests for row in _episode_rows(m)], _EPISODE_TYPES)
    _replace(folder / PLAN, json.dumps(_header(plan, kind), indent=1) + "\n")


def step_folder(folder: Path, step: int) -> Path:
    """Where a run keeps a step's manifest, in the folder of all of them."""
    return folder / f"step-{step:05d}"


def read_plan(folder: Path) -> WrittenPlan:
    """A dry run, a step of a run or all its steps, numbered from 0.

    UserError in one line where the folder holds none, or one that this program can't read.
    """
    of_steps = sorted(path.parent for path in folder.glob(f"step-*/{PLAN}"))
    if (folder / PLAN).is_file() or not of_steps:
        of_steps = [folder]
    plans = [_read_folder(one) for one in of_steps]
    steps = (step for plan in plans for step in plan.steps)
    numbered = (replace(step, manifest=replace(step.manifest, step=n)) for n, step in enumerate(steps))
    return replace(plans[0], folder=folder, steps=tuple(numbered))


def _read_folder(folder: Path) -> WrittenPlan:
    try:
        header = json.loads((folder / PLAN).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no dry run: write one with lightning train --dry-run --manifests {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / PLAN} can't be read: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{folder} was written by another version of lightning; write the dry run anew")
    kind = header["files"]
    choices: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    episodes: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in _read(folder / f"choices.{kind}"):
        choices[row["step"]].append(row)
    for row in _read(folder / f"episodes.{kind}"):
        episodes[row["step"]].append(row)
    steps = []
    for said in header["steps"]:
        step = said["step"]
        manifest = _manifest(header, said, choices[step], episodes[step])
        steps.append(StepPlan(manifest, StepCounts(**said["counts"])))
    return WrittenPlan(
        folder=folder,
        policy=header["policy"],
        start_version=header["start_version"],
        start_from_base=header["start_from_base"],
        settings=header["settings"],
        steps=tuple(steps),
    )


def _header(plan: WrittenPlan, kind: FileKind) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "files": kind,
        "policy": plan.policy,
        "start_version": plan.start_version,
        "start_from_base": plan.start_from_base,
        "settings": dict(plan.settings),
        "steps": [
            {
                "step": step.manifest.step,
                "from_version": step.manifest.from_version,
                "counts": asdict(step.counts),
            }
            for step in plan.steps
        ],
    }


def _choice_rows(manifest: StepManifest) -> Iterator[dict[str, Any]]:
    for choice in manifest.choices:
        why = "trained" if choice.reason is None else in_words(choice.reason)
        yield {"step": manifest.step, **asdict(choice), "why": why}


def _episode_rows(manifest: StepManifest) -> Iterator[dict[str, Any]]:
    group_of = {choice.episode_id: choice.group_id for choice in manifest.choices}
    for name in dict.fromkeys([*manifest.reward_ids, *manifest.returns]):
        yield {
            "step": manifest.step,
            "episode_id": name,
            "group_id": group_of.get(name),
            "value": manifest.returns.get(name),
            "reward_ids": list(manifest.reward_ids.get(name, ())),
        }


def _manifest(
    header: Mapping[str, Any],
    said: Mapping[str, Any],
    choices: Sequence[Mapping[str, Any]],
    episodes: Sequence[Mapping[str, Any]],
) -> StepManifest:
    return StepManifest(
        run_id="",
        step=said["step"],
        policy=header["policy"],
        from_version=said["from_version"],
        choices=tuple(
            ManifestChoice(**{name: value for name, value in row.items() if name not in ("step", "why")})
            for row in choices
        ),
        reward_ids={row["episode_id"]: tuple(row["reward_ids"]) for row in episodes},
        returns={row["episode_id"]: row["value"] for row in episodes if row["value"] is not None},
    )


def _write(file: Path, rows: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    if file.suffix == ".jsonl":
        _replace(file, "".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow as pa
    from pyarrow import parquet

    fields = [(name, pa.list_(pa.string()) if kind == "list" else kind) for name, kind in types.items()]
    table = pa.Table.from_pylist(list(rows), schema=pa.schema(fields))
    partial = file.with_name(f".{file.name}")
    parquet.write_table(table, partial)
    os.replace(partial, file)


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in file.read_text().splitlines()]
        if find_spec("pyarrow") is None:
            raise UserError(f"{file} needs pyarrow: pip install 'lightning-rl[parquet]'")
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be read: {error}") from None
    return rows


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}")
    partial.write_text(text)
    os.replace(partial, file)
