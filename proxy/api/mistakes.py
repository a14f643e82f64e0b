"""What is wrong with a request to our API, in one line that its sender can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from ...errors import UserError, plain_words

MAX_SHOWN_CHARS = 60


def one_line(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first mistake in words, and how many more there are."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return " ".join(f"{_words(errors[0])}{more}".split())


async def refuse_unknown_query(request: Request) -> None:
    """A misspelt filter would otherwise show everything. What looks at our health may add what it likes."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.path.startswith("/lightning/api"):
        return
    known = {parameter.alias for parameter in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UserError(f"query parameter {name!r} is not one of this request's ({choices})")


def _words(error: Mapping[str, Any]) -> str:
    kind, context = str(error["type"]), error.get("ctx", {})
    if isinstance(error.get("input"), bytes) and len(error["loc"]) == 1:
        return "the body was not sent as JSON; add the header `content-type: application/json`"
    if kind == "json_invalid":
        return f"the body is not JSON: {context.get('error', error['msg'])}"
    parts = [str(part) for part in error["loc"][1:]]
    field = ".".join(parts)
    where = f"field {field!r}" if field else f"the {error['loc'][0]}"
    if len(parts) > 2 and parts[-1] == "[key]":
        where = f"a key of field {'.'.join(parts[:-2])!r}"
    said = plain_words(error)
    is_about_value = kind not in ("missing", "extra_forbidden", "value_error")
    return f"{where} {said}" + (f", not {_shown(error.get('input'))}" if is_about_value else "")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
