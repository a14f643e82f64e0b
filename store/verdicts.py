"""What the publisher found out about a version, in words for one cell of a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..records import VersionStatus


def verdict_words(verdict: Mapping[str, Any] | None, status: VersionStatus | None = None) -> str:
    """ "follows (slope 1.00, gap 0.00031)"; of a rejected version, why; "-" where nobody has looked yet."""
    if not verdict:
        return "-"
    reason = str(verdict.get("reason") or "-")
    result = verdict.get("result")
    if status is VersionStatus.REJECTED or result not in {"follows", "indistinguishable"}:
        return reason
    found = [
        f"{name} {value:.2g}" if name == "gap" else f"{name} {value:.2f}"
        for name, value in (("slope", verdict.get("slope")), ("gap", verdict.get("gap_rms")))
        if isinstance(value, int | float)
    ]
    if result == "indistinguishable" and isinstance(verdict.get("moved_rms"), int | float):
        found.insert(0, f"moved {verdict['moved_rms']:.2g}")
    said = f"{result} ({', '.join(found)})" if found else str(result)
    evaluated = (verdict.get("evaluation") or {}).get("numbers") or {}
    return "; ".join([said, *(f"{name} {value:.3g}" for name, value in list(evaluated.items())[:3])])
