"""What identifies a version's weights: the trainer writes it into its candidate, the publisher checks it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum_of(folder: Path) -> str:
    """`sha256:…` over the weight files (*.safetensors) of a folder, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
