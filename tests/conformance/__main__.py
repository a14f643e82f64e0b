"""`make conformance`: every case straight and through the proxy. The last line is a JSON object.

Names or their beginnings as arguments choose cases; `ws-`, `blocked`, `disconnects`, `schemathesis` and
`live-` choose the other parts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lightning_rl.tests.conformance.blocked import blocked
from lightning_rl.tests.conformance.cases_websocket import CONVERSATIONS, run_conversation
from lightning_rl.tests.conformance.catalogue import all_cases
from lightning_rl.tests.conformance.compare import run_case
from lightning_rl.tests.conformance.disconnects import random_disconnects, until_gone_ms
from lightning_rl.tests.conformance.own_api import fuzz_own_api
from lightning_rl.tests.conformance.real_engine import (
    live_cases,
    live_system,
    model_folder,
    run_live,
    why_not,
)
from lightning_rl.tests.conformance.running import Running, running


@dataclass
class Tally:
    chosen: list[str]
    num_cases: int = 0
    num_identical: int = 0
    num_exact: int = 0
    num_recordable: int = 0
    declared: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        return not self.chosen or any(name.startswith(part) for part in self.chosen)

    def group(self, title: str, num_cases: int, num_identical: int) -> None:
        self.num_cases += num_cases
        self.num_identical += num_identical
        if num_cases:
            print(f"{title:<24} {num_identical:>4} of {num_cases:>4} identical", flush=True)


def main() -> int:
    tally = Tally(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as system:
        _replays(system, tally)
        _conversations(system, tally)
        _admin_routes(system, tally)
        _own_api(system, tally)
        _disconnects(system, tally)
        if (traceback := system.traceback()) is not None:
            tally.faults.append(f"the proxy wrote a traceback: {traceback}")
    _live(tally)
    return _report(tally)


def _replays(system: Running, tally: Tally) -> None:
    groups, left_out = all_cases()
    for group, cases in groups.items():
        chosen = [case for case in cases if tally.wants(case.name)]
        num_identical = 0
        for case in chosen:
            verdict = run_case(system, case)
            num_identical += not verdict.faults
            tally.num_recordable += case.tokens is not None
            tally.num_exact += verdict.is_exact is True
            if verdict.declared is not None:
                tally.declared[verdict.declared] += 1
            tally.faults += [f"{case.name}: {fault}" for fault in verdict.faults]
        tally.group(group, len(chosen), num_identical)
    for line in left_out:
        print(f"left out: {line}")


def _conversations(system: Running, tally: Tally) -> None:
    chosen = [conversation for conversation in CONVERSATIONS if tally.wants(conversation.name)]
    num_identical = 0
    for conversation in chosen:
        found = run_conversation(system, conversation)
        num_identical += not found
        tally.faults += [f"{conversation.name}: {fault}" for fault in found]
    tally.group("WebSocket", len(chosen), num_identical)


def _admin_routes(system: Running, tally: Tally) -> None:
    if tally.wants("blocked"):
        num_tried, passed = blocked(system)
        print(f"{'admin routes':<24} {num_tried - len(passed):>4} of {num_tried:>4} blocked", flush=True)
        tally.faults += passed


def _own_api(system: Running, tally: Tally) -> None:
    if tally.wants("schemathesis"):
        num_requests, faults = fuzz_own_api(system)
        shown = "a 5xx" if faults else "no 5xx"
        print(f"our own API under schemathesis: {num_requests} requests, {shown}", flush=True)
        tally.faults += faults if num_requests else [*faults, "schemathesis made no requests"]


def _disconnects(system: Running, tally: Tally) -> None:
    if not tally.wants("disconnects"):
        return
    for moment, (median_ms, max_ms) in until_gone_ms(system).items():
        times = f"{median_ms:.1f} ms (at most {max_ms:.1f})"
        print(f"client leaves {moment}: the engine's request is gone after {times}")
        if median_ms > 200:
            tally.faults.append(f"a client that leaves {moment} is noticed after {median_ms:.0f} ms")
    statuses, faults = random_disconnects(system)
    told = ", ".join(f"{num} {status}" for status, num in statuses.most_common())
    print(f"500 clients left at random: {len(faults)} orphans or unexplained rows; {told}", flush=True)
    tally.faults += faults


def _live(tally: Tally) -> None:
    chosen = [case for case in live_cases() if tally.wants(case.name)]
    if not chosen:
        return
    model = model_folder()
    if (reason := why_not(model)) is not None:
        print(f"left out: the real vLLM: {reason}")
        return
    num_identical = 0
    with live_system(model) as (engine, proxy, database):
        with ThreadPoolExecutor(8) as pool:  # an engine answers eight in the time of two
            verdicts = list(pool.map(lambda case: run_live(engine, proxy, database, case), chosen))
        for case, (found, is_exact) in zip(chosen, verdicts, strict=True):
            num_identical += not found
            tally.num_recordable += 1
            tally.num_exact += is_exact
            tally.faults += [f"{case.name}: {fault}" for fault in found]
    tally.group("real vLLM, hermes parser", len(chosen), num_identical)


def _report(tally: Tally) -> int:
    for reason, num in sorted(tally.declared.items()):
        print(f"declared unrecordable: {num:>3}  {reason}")
    for fault in tally.faults:
        print(f"FAULT {fault}", file=sys.stderr)
    result = {
        "cases": tally.num_cases,
        "identical": tally.num_identical,
        "captured_exact": tally.num_exact,
        "declared_unrecordable": sum(tally.declared.values()),
    }
    print(json.dumps(result))
    return 0 if not tally.faults and tally.num_exact == tally.num_recordable else 1


if __name__ == "__main__":
    sys.exit(main())
