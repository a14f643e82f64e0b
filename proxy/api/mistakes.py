"""What is wrong with a request to our API, in one line that its sender can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN_CHARS = 60

_TEXTS = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of this request",
    "string_type": "must be text",
    "string_unicode": "must be text without half characters (lone surrogates)",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}
"""By pydantic's type of error; a type that is not here keeps pydantic's own sentence."""


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
    text = _TEXTS.get(kind)
    said = str(error["msg"]) if text is None else text.format(**context)
    is_about_value = kind not in ("missing", "extra_forbidden", "value_error")
    return f"{where} {said}" + (f", not {_shown(error.get('input'))}" if is_about_value else "")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
