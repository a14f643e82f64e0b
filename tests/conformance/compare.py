"""One case, straight and through the proxy: the same bytes for the client, the documented bytes for the
engine, and in the log what the engine sent."""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.store.read import load_episodes
from lightning_rl.tests.conformance import substitutions
from lightning_rl.tests.conformance.case import Case, Tokens
from lightning_rl.tests.conformance.running import Running
from lightning_rl.tests.conformance.wire import Pairs, RawAnswer, ask_all

NUM_CUTS = 4


@dataclass
class Verdict:
    faults: list[str] = field(default_factory=list)
    is_exact: bool | None = None  # None: nothing to capture
    declared: str | None = None


def run_case(running: Running, case: Case, num_cuts: int = NUM_CUTS) -> Verdict:
    verdict = Verdict()
    for cut in range(num_cuts):
        _run_once(running, case, cut, verdict)
        if verdict.faults:
            break
    return verdict


def _run_once(running: Running, case: Case, cut: int, verdict: Verdict) -> None:
    mark = f"{case.name}-{cut}".encode()
    more: Pairs = ((substitutions.MARK, mark),)
    running.answers[mark] = case.answer
    running.engine.rng = random.Random(f"{case.name}/{cut}")
    straight = ask_all(running.engine_address, case.questions, "", more)
    sent_straight = running.asked.pop(mark, [])
    episode = f"{case.name}-{cut}"
    proxied = ask_all(running.address, case.questions, f"/episodes/{episode}", more)
    sent_proxied = running.asked.pop(mark, [])
    faults = verdict.faults
    faults += _answers(case, straight, proxied)
    wanted = [substitutions.straight_request(asked, case) for asked in sent_straight]
    got = [substitutions.proxied_request(asked) for asked in sent_proxied]
    if wanted != got:
        faults.append(f"cut {cut}: the engine got {_shorten(got)}, not {_shorten(wanted)}")
    _check_log(running, case, episode, verdict)


def _answers(case: Case, straight: list[RawAnswer], proxied: list[RawAnswer]) -> list[str]:
    faults = []
    for one, other in zip(straight, proxied, strict=True):
        if not one.status_line or not other.status_line:
            faults.append(f"answer {other.status_line!r}, not {one.status_line!r}")
            continue
        wanted, got = substitutions.straight_answer(one, case), substitutions.proxied_answer(other)
        if wanted != got:
            for name in ("status", "reason", "headers", "body", "is_broken"):
                a, b = getattr(wanted, name), getattr(got, name)
                if a != b:
                    faults.append(f"{name}: {_difference(b, a)}")
        if [line.split(b" ")[1] for line in one.interim] != [line.split(b" ")[1] for line in other.interim]:
            faults.append(f"interim answers: {other.interim}, not {one.interim}")
    return faults


def _difference(got: Any, wanted: Any) -> str:
    if not isinstance(got, bytes):
        return f"{_shorten(got)}, not {_shorten(wanted)}"
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    at = min(len(got), len(wanted)) if at is None else at
    around = slice(max(0, at - 60), at + 100)
    return f"at byte {at} of {len(got)}, wanted {len(wanted)}: {got[around]!r}, not {wanted[around]!r}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 1200 else text[:1200] + "…"


# --- the log ---


def rows_of(running: Running, episode: str) -> list[dict[str, Any]]:
    with running.database.read() as conn:
        found = conn.exec_driver_sql("SELECT * FROM calls WHERE episode_id = ? ORDER BY ordinal", (episode,))
        return [dict(row) for row in found.mappings()]


def settled_rows(running: Running, episode: str, num: int = 1) -> list[dict[str, Any]]:
    """Once the calls' ends, and whether they were delivered, are written."""
    deadline = time.monotonic() + 10
    while True:
        rows = rows_of(running, episode)
        if len(rows) >= num and all(row["delivered"] is not None for row in rows):
            return rows
        if time.monotonic() > deadline:
            return rows
        time.sleep(0.01)


def _check_log(running: Running, case: Case, episode: str, verdict: Verdict) -> None:
    if case.tokens is None and case.declared is None and case.status is None:
        return
    rows = settled_rows(running, episode, len(case.questions))
    if len(rows) != len(case.questions):
        verdict.faults.append(f"the log has {len(rows)} rows")
        return
    for row in rows:
        if row["unrecordable"] != case.declared:
            verdict.faults.append(f"declared {row['unrecordable']!r}, not {case.declared!r}")
        if case.status is not None and row["status"] != case.status:
            verdict.faults.append(f"status {row['status']!r}, not {case.status!r}")
    if case.declared is not None:
        verdict.declared = case.declared
    if case.tokens is not None:
        found = captured(running, episode)
        is_exact = bool(found) and all(tokens == in_floats(case.tokens) for tokens in found)
        verdict.is_exact = is_exact and verdict.is_exact is not False
        if not is_exact:
            verdict.faults.append(f"captured {_shorten(found)}, not {_shorten(case.tokens)}")


def captured(running: Running, episode: str) -> list[Tokens]:
    """What the trainer would read, in the engine's own numbers (logprobs as 32-bit floats)."""
    with running.database.read() as conn:
        (found,) = load_episodes(conn, [episode])
    return [
        Tokens(
            tuple(call.prompt_ids.tolist()),
            tuple(tuple(choice.completion_ids.tolist()) for choice in call.choices),
            tuple(tuple(choice.behavior_logprobs.tolist()) for choice in call.choices),
        )
        for call in found.calls
    ]


def in_floats(tokens: Tokens) -> Tokens:
    """The same with logprobs rounded to what the log stores."""
    rounded = tuple(tuple(array("f", values).tolist()) for values in tokens.logprobs)
    return Tokens(tokens.prompt_ids, tokens.ids, rounded)
