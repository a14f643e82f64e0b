"""A version's folder, looked at before an engine loads it.

A folder that vLLM 0.32 can't load kills it (full weights) or is refused half-way (adapters): everything that
can be known from outside is checked here first. Reads files only; knows neither the database nor the engine.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ...engine.checksum import checksum_of
from ...errors import PublishError
from ...records import WeightsKind

_MAX_HEADER_BYTES = 256 * 1024 * 1024

Shapes = dict[str, tuple[int, ...]]


class FilesError(PublishError):
    """A version's folder is not what was trained."""


def check_files(path: Path, kind: WeightsKind, checksum: str | None, base: Path | None) -> None:
    """Raise FilesError with the first thing that is wrong with a version's folder.

    `base` is the folder of the base model if it can be read: full weights must have its tensors, name by
    name, and an adapter's matrices must fit onto those that they change.
    """
    config = "adapter_config.json" if kind is WeightsKind.LORA else "config.json"
    if not path.is_dir():
        raise FilesError(f"no such folder: {path}")
    if not (path / config).is_file():
        raise FilesError(f"{path} has no {config}")
    shapes = read_shapes(path)
    if checksum is not None and (found := checksum_of(path)) != checksum:
        raise FilesError(f"the weights in {path} are not those that were trained: {found}, not {checksum}")
    if kind is WeightsKind.LORA:
        if not any("lora_A" in name for name in shapes):
            raise FilesError(f"{path} holds no LoRA tensors")
        if base is not None and base.is_dir():
            _compare_adapter(path, shapes, read_shapes(base))
    elif base is not None and base.is_dir():
        _compare(path, shapes, read_shapes(base))


def read_shapes(folder: Path) -> Shapes:
    """Names and shapes of all tensors in a folder; FilesError where a file is missing, cut or
    unreadable."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FilesError(f"{folder} holds no *.safetensors file")
    shapes: Shapes = {}
    try:
        for file in files:
            shapes |= _header(file)
    except OSError as error:
        raise FilesError(f"can't read {error.filename}: {error.strerror}") from None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_bytes())["weight_map"])
        if missing := sorted(named - shapes.keys()):
            raise FilesError(f"{folder} lacks {len(missing)} tensors of its index, such as {missing[0]}")
    return shapes


def _header(file: Path) -> Shapes:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise FilesError(f"{file} is not a safetensors file, or it is cut")
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FilesError(f"{file} has a damaged header") from None
    size, wanted = file.stat().st_size, 8 + length + max(ends, default=0)
    if size != wanted:
        raise FilesError(f"{file} is cut or damaged: {size} bytes, {wanted} expected")
    return shapes


def _compare_adapter(path: Path, found: Shapes, base: Shapes) -> None:
    """Where the base has a matrix of that name; vLLM may copy a smaller adapter into a corner of its own."""
    for name, shape in found.items():
        module, is_a, _ = name.partition(".lora_A.")
        if not is_a:
            module, is_b, _ = name.partition(".lora_B.")
            if not is_b:
                continue
        changed = base.get(f"{module.removeprefix('base_model.model.')}.weight")
        if changed is None or len(changed) != 2 or 1 in changed or len(shape) != 2:
            continue  # not a plain matrix there, such as one that is packed
        fits = shape[1] == changed[1] if is_a else shape[0] == changed[0]
        if not fits:
            raise FilesError(
                f"{path} is an adapter of another base model: {name} is {shape}, and the matrix that it "
                f"changes is {changed}"
            )


def _compare(path: Path, found: Shapes, wanted: Shapes) -> None:
    """Tied output weights may be written or left out."""
    tied = {"lm_head.weight"}
    if missing := sorted(wanted.keys() - found.keys() - tied):
        raise FilesError(f"{path} lacks {len(missing)} tensors of the base model, such as {missing[0]}")
    if extra := sorted(found.keys() - wanted.keys() - tied):
        raise FilesError(f"{path} has {len(extra)} tensors that the base model lacks, such as {extra[0]}")
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            raise FilesError(f"{path}: {name} is {found[name]}, the base model's is {wanted[name]}")
