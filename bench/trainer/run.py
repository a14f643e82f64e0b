"""`make bench-trainer`: the same recorded calls, the same model, the same optimizer step, computed five ways.

Stock TRL at its best micro-batch, our padded rows, rows merged along episodes, the prefix tree, and what
`lightning train` chooses by itself: the agent's own tokens per second and peak memory of each. Every
measurement is a process of its own. The last line is one JSON object.

On a GPU machine: make bench-trainer BENCH_FLAGS="--device cuda --write"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from figures import Found, last_line, table, write_page
from rich.console import Console

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "performance.md"
CASES = ("2 calls", "8 calls", "16 calls", "long shared prompt", "forked")
WAYS = ("stock", "padded", "merged", "tree", "chosen")
Ask = Callable[..., dict[str, Any]]


def ask_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "ways.py"), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"bench-trainer: {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(ask: Ask, case: str, way: str, device: str, gradient: Path) -> dict[str, Any]:
    asked = [way, case, "--device", device]
    if way == "stock":  # the search is a process of its own, so that its memory is not the measurement's
        asked += ["--rows", str(ask(*asked, "--search")["rows"])]
    return ask(*asked, "--gradient", str(gradient))


def measured_all(ask: Ask, cases: Sequence[str], device: str) -> Found:
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            reference = None
            for way in WAYS:
                file = Path(folder) / "gradient.pt"
                row = found[case, way] = measured(ask, case, way, device, file)
                gradient = torch.load(file, weights_only=True)
                reference = gradient if reference is None else reference
                row["gradient_off"] = float((gradient - reference).norm() / reference.norm())
                rate = f"{row['call_tokens_per_sec']:.0f} tokens/s"
                print(f"[{time.strftime('%H:%M:%S')}] {case}, {way}: {rate}", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None, ask: Ask = ask_process) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "smallest"], default=list(CASES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/performance.md")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench-trainer: torch sees no GPU here; run it without --device cuda")
    found = measured_all(ask, asked.cases, asked.device)
    Console(width=120).print(table(found))
    if asked.write:
        write_page(PAGE, found, asked.device)
    print(json.dumps(last_line(found)))


if __name__ == "__main__":
    main()
