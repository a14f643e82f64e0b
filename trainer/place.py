"""How far a run has come: what its parts share, and all of it that is not weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class RunPlace:
    run_id: str
    folder: Path
    version: int  # of the newest weights, and of those the next step starts from
    steps_planned: int = 0  # manifests in the log, those that trained nothing included: the next one's number
    steps_trained: int = 0
