"""The bench's figures as a table, as the last line, and as a part of docs/performance.md."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table
from subject import SUBJECTS

Found = dict[tuple[str, str], dict[str, Any]]  # by case and way

COLUMNS = ("case", "way", "tokens/s", "times stock", "peak MiB", "layout", "gradient off by")


def ratio(found: Found, case: str, way: str, other: str) -> float:
    rates = [found[case, name]["call_tokens_per_sec"] for name in (way, other)]
    return float(rates[0] / rates[1])


def columns(found: Found) -> list[str]:
    return [*COLUMNS, *(["MFU %"] if any(row["mfu"] is not None for row in found.values()) else [])]


def cells(found: Found, case: str, way: str) -> list[str]:
    row = found[case, way]
    shown = [
        case,
        way,
        f"{row['call_tokens_per_sec']:,.0f}",
        f"{ratio(found, case, way, 'stock'):.1f}",
        f"{row['peak_mb']:,.0f}",
        row["layout"],
        f"{row['gradient_off']:.1e}",
    ]
    if "MFU %" in columns(found):
        shown.append("" if row["mfu"] is None else f"{row['mfu']:.1f}")
    return shown


def table(found: Found) -> Table:
    shown = Table(title=f"One optimizer step, groups of 8 siblings ({machine(found)})")
    for column in columns(found):
        shown.add_column(column, justify="left" if column in ("case", "way", "layout") else "right")
    before = None
    for case, way in found:
        if before not in (None, case):
            shown.add_section()
        before = case
        shown.add_row(*cells(found, case, way))
    return shown


def machine(found: Found) -> str:
    device = next(iter(found.values()))["device"]
    subject = SUBJECTS["cpu" if device == "cpu" else "cuda"]
    named = f"{os.cpu_count()} cores of {platform.machine()}" if device == "cpu" else device
    return f"{named}, {subject.what}"


def last_line(found: Found) -> dict[str, float | None]:
    def speedup(case: str) -> float | None:
        return ratio(found, case, "chosen", "stock") if (case, "chosen") in found else None

    shared, eight = "long shared prompt", "8 calls"
    line = {
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
    best = [row["mfu"] for (_, way), row in found.items() if way == "chosen" and row["mfu"] is not None]
    return line | ({"mfu": max(best)} if best else {})


def write_page(page: Path, found: Found, device: str) -> None:
    """Replace what is between the page's two marks for this device."""
    begin, end = (f"<!-- bench-trainer {device} {edge} -->\n" for edge in ("begins", "ends"))
    text = page.read_text()
    before, rest = text.split(begin)
    _, after = rest.split(end)
    names = columns(found)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    lines = [
        f"{machine(found)}; {packages}.",
        "",
        f"| {' | '.join(names)} |",
        f"|{'---|' * len(names)}",
        *(f"| {' | '.join(cells(found, case, way))} |" for case, way in found),
    ]
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after)
