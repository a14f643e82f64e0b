"""A version's folder is looked at before an engine is told to load it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from fakes.fake_engine import write_folder

from lightning_rl.errors import PublishError
from lightning_rl.proxy.publishing.version_files import check_files, read_shapes
from lightning_rl.records import WeightsKind

FULL, LORA = WeightsKind.FULL, WeightsKind.LORA


def tensors(folder: Path, **shapes: tuple[int, ...]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * (shape[0] if shape else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def test_whole_folders_pass(tmp_path: Path) -> None:
    full = write_folder(tmp_path / "full", 1.0)
    lora = write_folder(tmp_path / "lora", 1.0, is_adapter=True)
    check_files(tmp_path / "full", FULL, full, tmp_path / "full")
    check_files(tmp_path / "lora", LORA, lora, None)
    check_files(tmp_path / "full", FULL, None, tmp_path / "not there")
    assert full.startswith("sha256:")
    assert read_shapes(tmp_path / "full") == {"w": (1,)}


@pytest.mark.parametrize("keep", [0, 5, 20, -1])
def test_a_cut_file_is_seen_without_a_checksum(tmp_path: Path, keep: int) -> None:
    write_folder(tmp_path / "v", 1.0)
    file = tmp_path / "v" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(PublishError, match=r"cut|damaged"):
        check_files(tmp_path / "v", FULL, None, None)


def test_one_changed_byte_is_seen_by_the_checksum(tmp_path: Path) -> None:
    checksum = write_folder(tmp_path / "v", 1.0)
    other = write_folder(tmp_path / "w", 1.0000001)
    assert other != checksum
    with pytest.raises(PublishError, match="not those that were trained"):
        check_files(tmp_path / "w", FULL, checksum, None)


def test_a_missing_configuration_or_weights_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "v", 1.0)
    with pytest.raises(PublishError, match=r"has no adapter_config\.json"):
        check_files(tmp_path / "v", LORA, None, None)
    (tmp_path / "v" / "model.safetensors").unlink()
    with pytest.raises(PublishError, match=r"holds no \*\.safetensors"):
        check_files(tmp_path / "v", FULL, None, None)
    with pytest.raises(PublishError, match="no such folder"):
        check_files(tmp_path / "w", FULL, None, None)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    tensors(tmp_path / "base", a=(4,), b=(2,))
    tensors(tmp_path / "fewer", a=(4,))
    tensors(tmp_path / "more", a=(4,), b=(2,), c=(1,))
    tensors(tmp_path / "other", a=(4,), b=(3,))
    tensors(tmp_path / "tied", a=(4,), b=(2,), **{"lm_head.weight": (4,)})
    base = tmp_path / "base"
    with pytest.raises(PublishError, match="lacks 1 tensors of the base model, such as b"):
        check_files(tmp_path / "fewer", FULL, None, base)
    with pytest.raises(PublishError, match="has 1 tensors that the base model lacks, such as c"):
        check_files(tmp_path / "more", FULL, None, base)
    with pytest.raises(PublishError, match=r"b is \(3,\), the base model's is \(2,\)"):
        check_files(tmp_path / "other", FULL, None, base)
    check_files(tmp_path / "tied", FULL, None, base)


def test_an_index_must_be_whole(tmp_path: Path) -> None:
    tensors(tmp_path / "v", a=(4,))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "v" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PublishError, match="lacks 1 tensors of its index, such as b"):
        read_shapes(tmp_path / "v")


def test_an_adapter_without_lora_tensors_is_none(tmp_path: Path) -> None:
    tensors(tmp_path / "v", a=(4,))
    (tmp_path / "v" / "adapter_config.json").write_text("{}")
    with pytest.raises(PublishError, match="holds no LoRA tensors"):
        check_files(tmp_path / "v", LORA, None, None)


def test_an_adapter_of_a_model_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors(tmp_path / "base", **{"model.layers.0.q_proj.weight": (6, 4)})

    def adapter(name: str, columns: int, rows: int) -> Path:
        module = "base_model.model.model.layers.0.q_proj"
        shapes = {f"{module}.lora_A.weight": (2, columns), f"{module}.lora_B.weight": (rows, 2)}
        tensors(tmp_path / name, **shapes)
        (tmp_path / name / "adapter_config.json").write_text("{}")
        return tmp_path / name

    check_files(adapter("fits", 4, 6), LORA, None, tmp_path / "base")
    for folder in (adapter("wide", 5, 6), adapter("tall", 4, 7), adapter("small", 3, 5)):
        with pytest.raises(PublishError, match="adapter of another base model"):
            check_files(folder, LORA, None, tmp_path / "base")
        check_files(folder, LORA, None, None)
