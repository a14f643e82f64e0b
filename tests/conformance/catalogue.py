"""All cases, and why some are not there."""

from __future__ import annotations

from lightning_rl.tests.conformance.case import Case
from lightning_rl.tests.conformance.cases_chat import chat_cases, other_json_cases
from lightning_rl.tests.conformance.cases_completions import completion_cases, declared_cases
from lightning_rl.tests.conformance.cases_errors import error_cases, header_cases
from lightning_rl.tests.conformance.cases_framing import framing_cases
from lightning_rl.tests.conformance.cases_http import http_cases
from lightning_rl.tests.conformance.cases_recorded import recorded_cases


def all_cases() -> tuple[dict[str, list[Case]], list[str]]:
    """By group, and a line for each group that is left out."""
    recorded, why = recorded_cases()
    groups = {
        "chat": chat_cases(),
        "other JSON answers": other_json_cases(),
        "event streams": framing_cases(),
        "completions": completion_cases(),
        "not recordable": declared_cases(),
        "errors": error_cases(),
        "headers": header_cases(),
        "HTTP": http_cases(),
        "recorded streams": recorded,
    }
    names = [case.name for cases in groups.values() for case in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return groups, [why] if why else []
