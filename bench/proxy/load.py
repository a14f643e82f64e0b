"""The load, a process of its own: so many connections, each asking again as soon as it has its answer.

`python load.py JSON` with the fields of `Load`; prints the fields of `Outcome` as JSON. Reads the CPU time of
the processes under test itself, right before the first call and after the last, so that nothing else counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import answers
import httptools

SETTLE_SEC = 0.3  # after the last answer: rows that nobody waited for are written
CALLS_PER_EPISODE = 8


@dataclass(frozen=True)
class Load:
    port: int
    first_call: int
    num_calls: int
    num_connections: int = 16
    streams: bool = False
    asks: bool = False  # for ids and logprobs; where the proxy does not do it by itself
    kind: str = ""  # "~" paced, "!" huge
    in_episodes: bool = False
    pids: list[int] = field(default_factory=list)  # whose CPU time counts


@dataclass(frozen=True)
class Outcome:
    num_calls: int
    num_errors: int
    first_error: str | None
    cpu_sec: float
    wall_sec: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def cpu_sec(pids: list[int]) -> float:
    """User and system time of these processes, all their threads included."""
    hertz = 100  # USER_HZ, the same on every Linux
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / hertz


class Connection(asyncio.Protocol):
    """One agent. Takes numbers from a shared iterator until there are none left."""

    def __init__(self, load: Load, calls: list[int], latencies_ms: list[float], errors: list[str]) -> None:
        self._load = load
        self._calls = calls
        self._latencies_ms = latencies_ms
        self._errors = errors
        self._transport: asyncio.Transport | None = None
        self._asked_at = 0.0
        self._body = bytearray()
        self._in_episode = 0
        self._episode = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        if not self._calls:
            self._finish()
            return
        call = self._calls.pop()
        if self._in_episode == 0:
            self._in_episode, self._episode = CALLS_PER_EPISODE, call
        self._in_episode -= 1
        load = self._load
        body = answers.request_body(call, streams=load.streams, asks=load.asks, kind=load.kind)
        prefix = f"/episodes/bench-{self._episode}" if load.in_episodes else ""
        head = (
            f"POST {prefix}/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
            f"content-type: application/json\r\nuser-agent: bench\r\nauthorization: Bearer none\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._body.clear()
        self._asked_at = time.perf_counter()
        assert self._transport is not None
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._latencies_ms.append(1000 * (time.perf_counter() - self._asked_at))
        status = self._parser.get_status_code()
        if status == 100:
            return
        whole = (
            b"data: [DONE]" in self._body[-32:]
            if self._load.streams
            else b'"finish_reason":"length"' in self._body
        )
        if status != 200 or not whole:
            self._errors.append(f"{status} {bytes(self._body[:300])!r}")
        self._parser = httptools.HttpResponseParser(self)
        asyncio.get_running_loop().call_soon(self.ask)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._errors.append(f"the connection was lost: {error}")
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def run(load: Load) -> Outcome:
    loop = asyncio.get_running_loop()
    calls = list(range(load.first_call + load.num_calls - 1, load.first_call - 1, -1))
    latencies_ms: list[float] = []
    errors: list[str] = []
    agents: list[Connection] = []
    for _ in range(load.num_connections):
        _, agent = await loop.create_connection(
            lambda: Connection(load, calls, latencies_ms, errors), "127.0.0.1", load.port
        )
        agents.append(agent)
    cpu, wall = cpu_sec(load.pids), time.perf_counter()
    for agent in agents:
        agent.ask()
    await asyncio.gather(*(agent.done for agent in agents))
    wall = time.perf_counter() - wall
    await asyncio.sleep(SETTLE_SEC)
    latencies_ms.sort()
    num = len(latencies_ms)
    return Outcome(
        num_calls=load.num_calls,
        num_errors=len(errors) + load.num_calls - num,
        first_error=errors[0] if errors else None,
        cpu_sec=cpu_sec(load.pids) - cpu,
        wall_sec=wall,
        p50_ms=latencies_ms[num // 2] if num else 0.0,
        p99_ms=latencies_ms[num * 99 // 100] if num else 0.0,
        max_ms=latencies_ms[-1] if num else 0.0,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Load(**json.loads(sys.argv[1])))))))
