"""Version folders: whole or not there, loadable, checksummed, and deleted only when nobody needs them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import tiny_models
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.engine.checksum import checksum_of
from lightning_rl.errors import UserError
from lightning_rl.records import PolicyVersion, VersionStatus, WeightsKind
from lightning_rl.trainer import version_folders
from lightning_rl.trainer.version_folders import keep_newest, save_version, set_old_aside


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_models.save(tmp_path / "base", tiny_models.qwen3())


def test_full_weights_are_a_model_folder(base, tmp_path):
    model = tiny_models.qwen3(seed=1)
    saved = save_version(model, tmp_path / "versions" / "00001", base_model=base, kind=WeightsKind.FULL)
    again = AutoModelForCausalLM.from_pretrained(saved.path)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (saved.path / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(saved.path)("w1 w2")["input_ids"] == [4, 5]
    assert again.dtype is torch.float32
    weights = (saved.path / "model.safetensors").read_bytes()
    assert saved.checksum == f"sha256:{hashlib.sha256(weights).hexdigest()}"
    assert saved.checksum == checksum_of(saved.path)
    assert [p.name for p in saved.path.parent.iterdir()] == ["00001"]


def test_an_adapter_is_what_vllm_and_peft_load(base, tmp_path):
    model = get_peft_model(tiny_models.qwen3(), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    saved = save_version(model, tmp_path / "00001", base_model=base, kind=WeightsKind.LORA)
    assert sorted(p.name for p in saved.path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((saved.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["r"] == 4
    again = PeftModel.from_pretrained(tiny_models.qwen3(), str(saved.path))
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(model(input_ids=ids).logits, again(input_ids=ids).logits)


def test_a_version_is_never_overwritten(base, tmp_path):
    save_version(tiny_models.qwen3(), tmp_path / "v", base_model=base, kind=WeightsKind.FULL)
    before = checksum_of(tmp_path / "v")
    with pytest.raises(UserError, match="exists already"):
        save_version(tiny_models.qwen3(seed=1), tmp_path / "v", base_model=base, kind=WeightsKind.FULL)
    assert checksum_of(tmp_path / "v") == before


def test_an_interrupted_save_leaves_nothing(base, tmp_path, monkeypatch):
    def interrupted(folder: Path) -> str:
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(version_folders, "checksum_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_version(tiny_models.qwen3(), tmp_path / "out" / "v", base_model=base, kind=WeightsKind.FULL)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(base, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write version folder"):
        save_version(tiny_models.qwen3(), tmp_path / "file" / "v", base_model=base, kind=WeightsKind.FULL)


def version(number: int, status: VersionStatus, folder: Path | None) -> PolicyVersion:
    return PolicyVersion(
        "policy",
        number,
        status,
        WeightsKind.FULL,
        None if folder is None else str(folder),
        None,
        (),
        None,
        None,
        None,
        0,
    )


def test_only_old_retired_folders_of_ours_are_deleted(tmp_path):
    status = [
        VersionStatus.RETIRED,
        VersionStatus.REJECTED,
        VersionStatus.RETIRED,
        VersionStatus.RETIRED,
        VersionStatus.DRAINING,
        VersionStatus.LIVE,
        VersionStatus.CANDIDATE,
    ]
    ours = tmp_path / "runs"
    folders = [ours / str(i) for i in range(len(status))]
    elsewhere = tmp_path / "mine"
    for folder in [*folders, elsewhere]:
        folder.mkdir(parents=True)
    versions = [version(i + 1, s, f) for i, (s, f) in enumerate(zip(status, folders, strict=True))]
    versions.insert(0, version(0, VersionStatus.RETIRED, elsewhere))
    assert [f.name for f in set_old_aside(versions, 2, inside=ours)] == [".0.deleted", ".1.deleted"]
    assert [f.exists() for f in folders] == [False, False, True, True, True, True, True]
    assert elsewhere.exists()
    assert set_old_aside(versions, 2, inside=ours) == []


def test_a_live_version_keeps_a_folder_that_an_old_one_shares(tmp_path):
    shared = tmp_path / "v"
    shared.mkdir()
    versions = [version(1, VersionStatus.RETIRED, shared), version(2, VersionStatus.LIVE, shared)]
    assert set_old_aside(versions, 0, inside=tmp_path) == []
    assert shared.exists()


def test_keep_newest(tmp_path):
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
    shutil.rmtree(folders[0])
    keep_newest(folders, 2)
    assert [f.exists() for f in folders] == [False, False, True, True]


def test_version_folders_know_no_torch():
    program = "import sys; from lightning_rl.trainer import candidate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
