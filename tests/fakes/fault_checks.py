"""What a client and an operator see while the log can't be written, and after: the same for every fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from fakes.running_proxy import Answer, Running, ask

from lightning_rl.store.verify import verify

DEADLINE_SEC = 60.0


def call(running: Running, text: str = "hello", **more: Any) -> Answer:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], **more}
    headers = {"X-Lightning-Episode": "e"}
    return ask(running.url, "/v1/chat/completions", json.dumps(body).encode(), headers)


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SEC
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def check_required(
    running: Running, break_it: Callable[[], None], mend_it: Callable[[], None], text: str
) -> None:
    """Held, refused with a time to come back at, and then as if nothing had been."""
    _first_call(running)
    break_it()
    held: list[Answer] = []
    waiting = threading.Thread(target=lambda: held.append(call(running, text, stream=True)))
    waiting.start()
    until(lambda: ask(running.url, "/healthz").status == 503, "the fault is not seen")
    refused = call(running)
    assert refused.status == 503
    assert dict(refused.headers)["retry-after"] == "1"
    assert "can't be recorded" in json.loads(refused.body)["error"]["message"]
    assert not held, "the end of an answer was delivered that the log does not hold"
    mend_it()
    waiting.join(DEADLINE_SEC)
    assert held[0].status == 200
    assert held[0].body.endswith(b"data: [DONE]\n\n")
    until(lambda: running.proxy.recorder.fault is None, "the fault is not over")
    assert ask(running.url, "/healthz").status == 200
    assert call(running).status == 200
    assert running.proxy.recorder.num_lost == 0
    _check_log(running, ["complete"] * 3)


def check_best_effort(
    running: Running, break_it: Callable[[], None], mend_it: Callable[[], None], text: str
) -> None:
    """Served all the time; written later, as far as the queue goes, and counted."""
    _first_call(running)
    break_it()
    assert call(running, text).status == 200
    until(lambda: running.proxy.recorder.fault is not None, "the fault is not seen")
    assert call(running).status == 200
    health = ask(running.url, "/healthz")
    assert health.status == 200
    assert json.loads(health.body)["recording"] != "ok"
    mend_it()
    until(lambda: running.proxy.recorder.fault is None, "the fault is not over")
    until(lambda: running.proxy.recorder.num_queued == 0, "what was queued is not written")
    assert call(running).status == 200
    assert running.proxy.recorder.num_lost == 0
    _check_log(running, ["complete"] * 4)


def check_loss_is_counted(
    running: Running, break_it: Callable[[], None], mend_it: Callable[[], None], text: str
) -> None:
    """`MAX_QUEUED` is small: what does not fit is lost, and the operator and the episode say so."""
    break_it()
    assert call(running, text).status == 200
    until(lambda: running.proxy.recorder.fault is not None, "the fault is not seen")
    for _ in range(6):
        assert call(running).status == 200
    assert running.proxy.recorder.num_lost > 0
    lost = running.proxy.recorder.num_lost
    mend_it()
    until(lambda: running.proxy.recorder.fault is None, "the fault is not over")
    assert call(running).status == 200
    until(lambda: bool(running.rows("episodes")[0]["has_gap"]), "the episode is not marked")
    status = json.loads(ask(running.url, "/lightning/api/status").body)
    assert status["recording"]["entries_lost"] == lost
    assert verify(running.database).faults == []


def _first_call(running: Running) -> None:
    """One that is wholly in the log, so that nothing of it meets the fault."""
    assert call(running).status == 200
    until(
        lambda: [row["delivered"] for row in running.rows("calls")] == [True],
        "the first call is not recorded",
    )


def _check_log(running: Running, statuses: list[str]) -> None:
    until(lambda: [row["status"] for row in running.rows("calls")] == statuses, str(running.rows("calls")))
    until(lambda: all(row["delivered"] for row in running.rows("calls")), "delivery is not recorded")
    assert not any(row["has_gap"] for row in running.rows("episodes"))
    assert verify(running.database).faults == []
