"""A folder that appears whole or not at all: written beside its place, flushed to the disk, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..records import new_id


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Gives the folder to write to; it takes the name `folder` when the block ends well."""
    partial = folder.parent / f".{folder.name}-{new_id()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in (*partial.rglob("*"), partial):
            flush(file)
        partial.rename(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
