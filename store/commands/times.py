"""Moments as people type them, and as they read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ...errors import UserError

_AGO = re.compile(r"(\d+)\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment_ms(text: str) -> int:
    """`90s`, `30m`, `12h`, `7d`, `2w` ago, or a date or time in ISO form (of this machine's zone).

    UserError for anything else.
    """
    match = _AGO.fullmatch(text.strip().lower())
    try:
        if match is not None:
            # Not by the clock on the wall, which jumps twice a year.
            ago = timedelta(**{_UNITS[match[2]]: int(match[1])})
            moment = datetime.now(UTC) - ago
        else:
            moment = datetime.fromisoformat(text.strip())
        return int(moment.timestamp() * 1000)
    except OverflowError:
        raise UserError(f"{text!r} is too far back; leave the limit out for everything") from None
    except ValueError:
        raise UserError(f"{text!r} is no time: write 30m, 12h, 7d or 2026-11-30T16:00") from None


def shown(at_ms: int | None) -> str:
    """In this machine's zone, to the second; what is no year of a calendar, as the log has it."""
    if at_ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(at_ms / 1000).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):  # which of them is the platform's choice
        return f"{at_ms} ms"
