"""`make bench-trainer`: the same recorded calls, the same model, the same optimizer step, computed five ways.

Stock TRL at its best micro-batch, our padded rows, rows merged along episodes, the prefix tree, and what
`lightning train` chooses by itself: the agent's own tokens per second and peak memory of each. Every
measurement is a process of its own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CASES = ("2 calls", "8 calls", "16 calls", "long shared prompt", "forked")
WAYS = ("stock", "padded", "merged", "tree", "chosen")
Found = dict[tuple[str, str], dict[str, Any]]


def measured(way: str, case: str, gradient: Path) -> dict[str, Any]:
    options = ["--gradient", str(gradient)]
    if way == "stock":  # the search is a process of its own, so that its memory is not the measurement's
        options += ["--rows", str(_said(way, case, "--search")["rows"])]
    return _said(way, case, *options)


def _said(way: str, case: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "ways.py"), way, case, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench-trainer: {way} on {case} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Found) -> Table:
    shown = Table(title="One optimizer step, groups of 8 siblings (CPU, float32)")
    for column in ("case", "way", "tokens/s", "times stock", "peak MiB", "layout", "gradient off by"):
        shown.add_column(column, justify="left" if column in ("case", "way", "layout") else "right")
    for case in CASES:
        for way in WAYS:
            if (case, way) in found:
                shown.add_row(*_row(case, way, found))
        shown.add_section()
    return shown


def _row(case: str, way: str, found: Found) -> tuple[str, ...]:
    row = found[case, way]
    layout = (
        f"{row['micro_batch_rows']} rows" if way == "stock" else f"{row['layout']} x{row['micro_batches']}"
    )
    return (
        case,
        way,
        f"{row['call_tokens_per_sec']:.0f}",
        f"{ratio(found, case, way, 'stock'):.1f}",
        f"{row['peak_mb']:.0f}",
        layout,
        f"{row['gradient_off']:.1e}",
    )


def ratio(found: Found, case: str, way: str, other: str) -> float:
    rates = [found[case, name]["call_tokens_per_sec"] for name in (way, other)]
    return float(rates[0] / rates[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            reference = None
            for way in WAYS:
                file = Path(folder) / f"{case}-{way}.pt"
                row = found[case, way] = measured(way, case, file)
                gradient = torch.load(file, weights_only=True)
                reference = gradient if reference is None else reference
                row["gradient_off"] = float((gradient - reference).norm() / reference.norm())
                file.unlink()
                rate = f"{row['call_tokens_per_sec']:.0f} tokens/s"
                print(f"[{time.strftime('%H:%M:%S')}] {case}, {way}: {rate}", file=sys.stderr, flush=True)
    Console(width=120).print(table(found))
    print(json.dumps(last_line(found)))


def last_line(found: Found) -> dict[str, float | None]:
    def speedup(case: str) -> float | None:
        return ratio(found, case, "chosen", "stock") if (case, "chosen") in found else None

    shared, eight = "long shared prompt", "8 calls"
    return {
        "speedup_2": speedup("2 calls"),
        "speedup_8": speedup(eight),
        "speedup_16": speedup("16 calls"),
        "tree_over_merged_shared_prompt": ratio(found, shared, "tree", "merged")
        if (shared, "tree") in found
        else None,
        "peak_mem_ratio_8": found[eight, "chosen"]["peak_mb"] / found[eight, "stock"]["peak_mb"]
        if (eight, "chosen") in found
        else None,
        "max_rel_grad_diff": max(row["gradient_off"] for row in found.values()),
    }


if __name__ == "__main__":
    main()
