"""What is wrong with a request to our API, in one line that its sender can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import plain_words

MAX_SHOWN_CHARS = 60


def one_line(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first mistake in words, and how many more there are."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return " ".join(f"{_words(errors[0])}{more}".split())


def _words(error: Mapping[str, Any]) -> str:
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind == "json_invalid":
        return f"the body is not JSON: {context.get('error', error['msg'])}"
    field = ".".join(str(part) for part in error["loc"][1:])
    where = f"field {field!r}" if field else f"the {error['loc'][0]}"
    said = plain_words(error)
    is_about_value = kind not in ("missing", "extra_forbidden", "value_error")
    return f"{where} {said}" + (f", not {_shown(error.get('input'))}" if is_about_value else "")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
