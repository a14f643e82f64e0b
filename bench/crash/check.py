"""After a kill: is every delivered answer in the log, exactly, and does every row explain itself?

Runs in a process of its own, so that the agents' load goes on meanwhile.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rl.records import Call, CallStatus
from lightning_rl.store.database import Database
from lightning_rl.store.read import calls_by_upstream_ids, load_episodes
from lightning_rl.store.verify import verify

ALLOWED_AGE_SEC = 5.0
"""A call that ran for longer than this must be in the log: 50 ms are promised, a loaded machine may stall."""


@dataclass(frozen=True, slots=True)
class Checked:
    num_rows: int
    missing: tuple[str, ...]  # delivered and not in the log
    inexact: tuple[str, ...]  # in the log with other ids or logprobs than the engine sent
    unexplained: tuple[str, ...]  # rows that say neither what was answered nor why not
    intents_missing: tuple[str, ...]  # had been running for long when the proxy was killed, and left no row
    open_rows: int  # cut off by a kill
    faults: tuple[str, ...]  # of `db verify`


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check(
    url: str,
    record: str,
    sent: Collection[str],
    delivered: Collection[str],
    cut: Mapping[str, float],
) -> Checked:
    """`cut`: calls that were on the way when their proxy was killed, and for how long."""
    answers = _answers(record, {f"chatcmpl-{call}" for call in delivered})
    database = Database.open(url)
    try:
        with database.read() as conn:
            found = calls_by_upstream_ids(conn, answers)
            names = sorted({call.rpartition("/")[0] for call in sent} & _episodes(conn))
            rows = [call for episode in load_episodes(conn, names) for call in episode.calls]
        faults = verify(database).faults
    finally:
        database.close()
    by_agent = {row.agent: row for row in rows}
    return Checked(
        num_rows=len(rows),
        missing=tuple(sorted(call for call in delivered if f"chatcmpl-{call}" not in found)),
        inexact=tuple(name for name, call in found.items() if not _is_exact(call, answers[name])),
        unexplained=tuple(row.id for row in rows if not _is_explained(row, sent, cut, delivered)),
        intents_missing=tuple(
            call for call, age_sec in cut.items() if age_sec > ALLOWED_AGE_SEC and call not in by_agent
        ),
        open_rows=sum(row.status is CallStatus.OPEN for row in rows),
        faults=tuple(f"{fault.table} {fault.key}: {fault.what}" for fault in faults),
    )


def _episodes(conn: Any) -> set[str]:
    return set(conn.exec_driver_sql("SELECT id FROM episodes").scalars())


def _answers(record: str, wanted: set[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with open(record) as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            if line[8 : line.index('"', 8)] in wanted:
                answer = json.loads(line)
                found[answer["id"]] = answer
    return found


def _is_exact(call: Call, answer: Mapping[str, Any]) -> bool:
    choices = [(choice["ids"], _float32(choice["logprobs"])) for choice in answer["choices"]]
    return (
        call.status is CallStatus.COMPLETE
        and call.prompt_ids.tolist() == answer["prompt"]
        and [(c.completion_ids.tolist(), c.behavior_logprobs.tolist()) for c in call.choices] == choices
        and all(choice.quarantine is None for choice in call.choices)
    )


def _float32(values: list[float]) -> list[float]:
    return list(struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values)))


def _is_explained(
    row: Call, sent: Collection[str], cut: Mapping[str, float], delivered: Collection[str]
) -> bool:
    """A client made the call; and it has its answer, or says how it failed, or was cut off by a kill."""
    if row.agent not in sent:
        return False
    if row.status is CallStatus.COMPLETE:
        return bool(row.choices)
    if row.status is CallStatus.OPEN:
        return row.agent in cut and row.agent not in delivered
    return row.agent not in delivered  # its status says how it failed
