"""The cases of `make conformance`, each once: straight and through a proxy in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance.blocked import blocked
from conformance.case import Case
from conformance.cases_websocket import CONVERSATIONS, Conversation, run_conversation
from conformance.catalogue import all_cases
from conformance.compare import run_case
from conformance.running import Running, running

GROUPS, LEFT_OUT = all_cases()
CASES = [case for cases in GROUPS.values() for case in cases]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("conformance")) as system:
        yield system
        assert system.traceback() is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_bytes_and_the_engines_own_tokens(system: Running, case: Case) -> None:
    assert run_case(system, case, num_cuts=1).faults == []


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.name)
def test_websockets(system: Running, conversation: Conversation) -> None:
    assert run_conversation(system, conversation) == []


def test_admin_routes_are_never_reached(system: Running) -> None:
    _, passed = blocked(system)
    assert passed == []


def test_there_are_enough_cases() -> None:
    assert len(CASES) - len(GROUPS["recorded streams"]) >= 80
