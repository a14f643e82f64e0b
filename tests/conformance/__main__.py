"""`make conformance`: every case straight and through the proxy. The last line is a JSON object."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from .blocked import blocked
from .cases_websocket import CONVERSATIONS, run_conversation
from .catalogue import all_cases
from .compare import run_case
from .running import running


def main() -> int:
    only = sys.argv[1:]
    groups, left_out = all_cases()
    num_cases = num_identical = num_exact = num_recordable = 0
    reasons: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as system:
        for group, cases in groups.items():
            chosen = [case for case in cases if not only or any(case.name.startswith(o) for o in only)]
            identical = 0
            for case in chosen:
                verdict = run_case(system, case)
                identical += not verdict.faults
                num_recordable += case.tokens is not None
                num_exact += verdict.is_exact is True
                if verdict.declared is not None:
                    reasons[verdict.declared] += 1
                faults += [f"{case.name}: {fault}" for fault in verdict.faults]
            if chosen:
                print(f"{group:<24} {identical:>4} of {len(chosen):>4} identical", flush=True)
            num_cases += len(chosen)
            num_identical += identical
        chosen_talks = [c for c in CONVERSATIONS if not only or any(c.name.startswith(o) for o in only)]
        same = 0
        for conversation in chosen_talks:
            found = run_conversation(system, conversation)
            same += not found
            faults += [f"{conversation.name}: {fault}" for fault in found]
        if chosen_talks:
            print(f"{'WebSocket':<24} {same:>4} of {len(chosen_talks):>4} identical", flush=True)
        num_cases += len(chosen_talks)
        num_identical += same
        if not only or "blocked" in only:
            num_tried, passed = blocked(system)
            print(f"{'admin routes':<24} {num_tried - len(passed):>4} of {num_tried:>4} blocked", flush=True)
            faults += passed
        if (traceback := system.traceback()) is not None:
            faults.append(f"the proxy wrote a traceback: {traceback}")
    for line in left_out:
        print(f"left out: {line}")
    for reason, num in sorted(reasons.items()):
        print(f"declared unrecordable: {num:>3}  {reason}")
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    result = {
        "cases": num_cases,
        "identical": num_identical,
        "captured_exact": num_exact,
        "declared_unrecordable": sum(reasons.values()),
    }
    print(json.dumps(result))
    return 0 if not faults and num_exact == num_recordable else 1


if __name__ == "__main__":
    sys.exit(main())
