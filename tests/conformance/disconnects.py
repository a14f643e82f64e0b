"""Clients that leave: how soon the engine is rid of their requests, and what the log says of them."""

from __future__ import annotations

import random
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lightning_rl.tests.conformance.case import SSE, body_of
from lightning_rl.tests.conformance.compare import rows_of
from lightning_rl.tests.conformance.replay import Asked, Reply
from lightning_rl.tests.conformance.running import Running
from lightning_rl.tests.conformance.substitutions import MARK
from lightning_rl.tests.conformance.vllm_forms import Script, Wants, chat_chunks, chat_json, events, words
from lightning_rl.tests.conformance.wire import Question

SCRIPT = Script(tuple(words(" ".join(f"w{i}" for i in range(60)))))
EXPLAINED = {
    "complete",  # the engine had finished
    "disconnected",  # the client left before that
    "error",  # the engine broke off, or refused
}


def _answering(before_head_sec: float, between_sec: float) -> Callable[[Asked], Reply]:
    def answer(asked: Asked) -> Reply:
        wants = Wants.of(asked.body)
        if b'"stream": true' in asked.body:
            blocks = events(chat_chunks(SCRIPT, wants))
            return Reply(
                headers=SSE,
                blocks=blocks,
                framing="chunked",
                after_sec=before_head_sec,
                between_sec=between_sec,
                cuts=False,
            )
        return Reply(blocks=(chat_json(SCRIPT, wants),), after_sec=before_head_sec)

    return answer


@contextmanager
def asking(running: Running, mark: bytes, episode: str, *, stream: bool) -> Iterator[socket.socket]:
    raw = socket.create_connection(running.address, timeout=10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    question = Question(pieces=(body_of(stream=stream),))
    try:
        raw.sendall(question.head(f"/episodes/{episode}", ((MARK, mark),)) + question.body)
        yield raw
    finally:
        raw.close()


def until_gone_ms(running: Running, num_times: int = 20) -> dict[str, tuple[float, float]]:
    """From the client's leaving to the end of the engine's request: median and maximum per moment."""
    moments = {
        "before headers": (True, 5.0, 0.0, 0),
        "during a stream": (True, 0.0, 0.02, 3),
        "waiting for JSON": (False, 5.0, 0.0, 0),
    }
    found = {}
    for moment, (stream, before_sec, between_sec, num_events) in moments.items():
        mark = b"leaving-" + moment.replace(" ", "-").encode()
        running.answers[mark] = _answering(before_sec, between_sec)
        times_ms = []
        for _ in range(num_times):
            with asking(running, mark, "leaving", stream=stream) as raw:
                _wait(lambda: running.engine.num_open == 1)
                received = b""
                while received.count(b"data:") < num_events:
                    received += raw.recv(4096)
                time.sleep(0.01)
            left_at = time.monotonic()
            _wait(lambda: running.engine.num_open == 0, 0.0005)
            times_ms.append((time.monotonic() - left_at) * 1000)
        found[moment] = (statistics.median(times_ms), max(times_ms))
    return found


def random_disconnects(running: Running, num: int = 500) -> tuple[Counter[str], list[str]]:
    """What the log says of so many calls whose clients left at random; and what it does not explain."""
    rng = random.Random(3)
    running.answers[b"random"] = _answering(0.01, 0.002)
    plans = [(i, rng.random(), rng.random() < 0.6, rng.choice(("fin", "reset"))) for i in range(num)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda plan: _leave(running, *plan), plans))
    faults = []
    try:
        _wait(lambda: running.engine.num_open == 0)
    except TimeoutError:
        faults.append(f"{running.engine.num_open} requests at the engine are orphans")
    statuses: Counter[str] = Counter()
    deadline = time.monotonic() + 20
    while True:
        rows = [row for i in range(16) for row in rows_of(running, f"random-{i}")]
        open_rows = [row for row in rows if row["status"] == "open" or row["delivered"] is None]
        if not open_rows or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for row in rows:
        statuses[f"{row['status']}{'' if row['delivered'] else ', not delivered'}"] += 1
        is_told = row["status"] == "complete" or row["error"]
        if row["status"] not in EXPLAINED or row["delivered"] is None or not is_told:
            faults.append(f"call {row['id']}: {row['status']}, delivered {row['delivered']}, {row['error']}")
    return statuses, faults


def _leave(running: Running, number: int, moment: float, stream: bool, way: str) -> None:
    """At a moment between connecting (0) and behind the answer (1)."""
    raw = socket.create_connection(running.address, timeout=10)
    question = Question(pieces=(body_of(stream=stream),))
    text = question.head(f"/episodes/random-{number % 16}", ((MARK, b"random"),)) + question.body
    try:
        if moment < 0.1:
            raw.sendall(text[: int(len(text) * moment * 10)])  # inside the request
            return
        raw.sendall(text)
        if moment < 0.85:
            time.sleep((moment - 0.1) * 0.25)
            return
        received = b""
        while not received.endswith(b"0\r\n\r\n") and b'"metrics":null}' not in received:
            received += raw.recv(65536)
    finally:
        if way == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()


def _wait(holds: Callable[[], bool], step_sec: float = 0.002, timeout_sec: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_sec
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(step_sec)
