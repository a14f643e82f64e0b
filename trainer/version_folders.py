"""Version folders: what a policy version looks like on disk.

A folder appears whole or not at all (written beside its place, flushed, renamed) and never changes
afterwards: the engine may be reading it. Full weights are a model folder of their own, an adapter is what
vLLM's load_lora_adapter reads. Which versions are live is the database's matter; the caller says what may be
deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.checksum import checksum_of
from ..errors import UserError
from ..records import PolicyVersion, VersionStatus, WeightsKind
from .whole_folder import whole_folder

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.model",
)
_DELETABLE = (VersionStatus.RETIRED, VersionStatus.REJECTED)


@dataclass(frozen=True, slots=True)
class SavedVersion:
    path: Path
    kind: WeightsKind
    checksum: str  # "sha256:…" over the weights files in the order of their names


def save_version(
    model: Any,
    folder: Path,
    *,
    base_model: Path,
    kind: WeightsKind,
    gathered: dict[str, Any] | None = None,
) -> SavedVersion:
    """Write the weights to `folder`, which must not exist yet. `gathered`: those of a sharded model."""
    folder = folder.resolve()
    if folder.exists():
        raise UserError(f"{folder} exists already; versions are never overwritten: use another --output")
    try:
        with whole_folder(folder) as partial:
            if kind is WeightsKind.LORA:
                write_adapter(model, partial, base_model, gathered)
            else:
                _write_full(model, partial, base_model, gathered)
            checksum = checksum_of(partial)
    except OSError as error:
        raise UserError(f"can't write version folder {folder}: {error.strerror or error}") from None
    return SavedVersion(folder, kind, checksum)


def set_old_aside(versions: Sequence[PolicyVersion], keep: int, *, inside: Path) -> list[Path]:
    """Rename the folders of all but the newest `keep` retired or rejected versions, so that nobody finds them
    any more; only folders under `inside`. The caller deletes them, which may take a while.

    A version in any other state is never touched.
    """
    over = [version for version in versions if version.status in _DELETABLE and version.path is not None]
    in_use = {Path(v.path).resolve() for v in versions if v.path is not None and v.status not in _DELETABLE}
    gone = []
    for version in sorted(over, key=lambda v: v.version)[: max(0, len(over) - keep)]:
        folder = Path(str(version.path)).resolve()
        if folder.is_dir() and folder.is_relative_to(inside.resolve()) and folder not in in_use:
            gone.append(folder.rename(folder.with_name(f".{folder.name}.deleted")))
    return gone


def keep_newest(folders: Iterable[Path], keep: int) -> None:
    """For versions that are in no database: delete all but the last `keep` of `folders`, given oldest
    first."""
    for folder in list(folders)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def write_adapter(model: Any, folder: Path, base_model: Path, gathered: dict[str, Any] | None = None) -> None:
    """As vLLM and peft load it."""
    model.peft_config["default"].base_model_name_or_path = str(base_model.resolve())
    model.save_pretrained(
        str(folder), selected_adapters=["default"], save_embedding_layers=False, **_state(gathered)
    )
    (folder / "README.md").unlink(missing_ok=True)  # peft's model card template


def _write_full(model: Any, folder: Path, base_model: Path, gathered: dict[str, Any] | None) -> None:
    model.save_pretrained(str(folder), **_state(gathered))
    for pattern in _TOKENIZER_FILES:  # byte by byte: what the engine tokenizes with must not change
        for file in base_model.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _state(gathered: dict[str, Any] | None) -> dict[str, Any]:
    return {} if gathered is None else {"state_dict": gathered}
