"""make bench-proxy: what a call costs in the proxy, beside LiteLLM's proxy and no proxy at all.

One run, one machine, one fake engine; every process is measured whole (user and system time of all its
threads). Prints a table and, as its last line, one JSON object. Exit code 1 where an answer was wrong or the
log does not hold every call exactly: then the figures are void.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import answers
import log_check
from load import Load, Outcome
from servers import HERE, Server, start_engine, start_lightning, start_litellm


@dataclass(frozen=True)
class Sizes:
    """How many calls each part makes."""

    warm: int
    json: int
    streams: int
    paced: int
    alone: int  # at one connection
    crowd: int  # over 256 connections
    huge: int
    soak: int  # JSON calls, all in all, until memory is looked at for the last time
    first_look: int
    litellm_json: int
    litellm_streams: int
    litellm_paced: int


FULL = Sizes(400, 10_000, 4_000, 480, 1_000, 4_096, 24, 100_000, 10_000, 600, 160, 96)
QUICK = Sizes(100, 2_000, 800, 96, 300, 1_024, 6, 4_000, 2_000, 100, 32, 32)


class Bench:
    """Makes loads and keeps count of them."""

    def __init__(self) -> None:
        self._next_call = 0
        self.errors: list[str] = []
        self.num_errors = 0
        self.recorded: set[int] = set()
        self.huge: set[int] = set()

    def run(self, name: str, server: Server, num_calls: int, **options: object) -> Outcome:
        load = Load(
            port=server.port,
            first_call=self._next_call,
            num_calls=num_calls,
            pids=server.pids(),
            **options,  # type: ignore[arg-type]
        )
        self._next_call += num_calls
        done = subprocess.run(
            [sys.executable, str(HERE / "load.py"), json.dumps(asdict(load))],
            stdout=subprocess.PIPE,
            check=True,
        )
        outcome = Outcome(**json.loads(done.stdout))
        made = range(load.first_call, self._next_call)
        if load.in_episodes:
            self.recorded.update(made)
            if load.kind == "!":
                self.huge.update(made)
        if outcome.num_errors:
            self.num_errors += outcome.num_errors
            self.errors.append(f"{name}: {outcome.num_errors} errors, the first: {outcome.first_error}")
        print(
            f"{name:34} {num_calls:7d} calls  {1000 * outcome.cpu_sec / num_calls:8.3f} ms CPU/call  "
            f"p50 {outcome.p50_ms:8.2f}  p99 {outcome.p99_ms:8.2f} ms  {num_calls / outcome.wall_sec:6.0f}/s",
            flush=True,
        )
        return outcome


@dataclass
class Costs:
    """CPU ms per call."""

    json: float
    stream: float
    paced: float


def measure(bench: Bench, name: str, server: Server, num: tuple[int, int, int, int], *, ours: bool) -> Costs:
    options = {"in_episodes": True} if ours else {"asks": True}
    warm, *sizes = num
    bench.run(f"{name}: warm-up", server, warm, **options)
    bench.run(f"{name}: warm-up, streams", server, warm, streams=True, **options)
    kinds: list[dict[str, object]] = [{}, {"streams": True}, {"streams": True, "kind": "~"}]
    costs = []
    for label, size, kind in zip(("JSON", "streams", "paced streams"), sizes, kinds, strict=True):
        outcome = bench.run(f"{name}: {label}", server, size, **options, **kind)
        costs.append(1000 * outcome.cpu_sec / size)
    return Costs(*costs)


def beside_huge_answers(bench: Bench, server: Server, sizes: Sizes) -> Outcome:
    """Small calls while 6 MB answers pass."""
    first = bench._next_call
    bench._next_call += sizes.huge
    load = Load(server.port, first, sizes.huge, 2, kind="!", in_episodes=True)
    bench.recorded.update(range(first, first + sizes.huge))
    bench.huge.update(range(first, first + sizes.huge))
    found: list[Outcome] = []

    def pass_them() -> None:
        command = [sys.executable, str(HERE / "load.py"), json.dumps(asdict(load))]
        found.append(
            Outcome(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
        )

    thread = threading.Thread(target=pass_them)
    thread.start()
    outcome = bench.run(
        "lightning: JSON beside 6 MB", server, sizes.json // 4, in_episodes=True, num_connections=4
    )
    thread.join()
    huge = found[0]
    print(
        f"{'lightning: 6 MB answers':34} {sizes.huge:7d} calls  "
        f"p50 {huge.p50_ms:8.1f}  p99 {huge.p99_ms:8.1f} ms"
    )
    bench.num_errors += huge.num_errors
    if huge.num_errors:
        bench.errors.append(f"6 MB answers: {huge.first_error}")
    return outcome


def soak(bench: Bench, server: Server, sizes: Sizes) -> tuple[float, float]:
    """Resident memory at the first look and at the end."""
    bench.run("lightning: until the first look", server, sizes.first_look, in_episodes=True)
    first = server.rss_mb()
    bench.run("lightning: until the last", server, sizes.soak - sizes.first_look, in_episodes=True)
    return first, server.rss_mb()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--litellm", type=Path, help="python of an environment that has LiteLLM's proxy server"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/bench-proxy"), help="for logs and the database"
    )
    parser.add_argument("--quick", action="store_true", help="few calls: for development")
    parser.add_argument("--only-json-and-streams", action="store_true", help="for development")
    chosen = parser.parse_args()
    sizes = QUICK if chosen.quick else FULL
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    database = f"sqlite:///{chosen.folder.absolute()}/log.db"
    bench = Bench()
    costs: dict[str, Costs] = {}
    alone = first_mb = last_mb = None
    with start_engine(chosen.folder) as engine:
        with start_lightning(chosen.folder, engine, database) as ours:
            direct = bench.run(
                "direct: JSON, one connection", engine, sizes.alone, num_connections=1, asks=True
            )
            alone = bench.run(
                "lightning: JSON, one connection", ours, sizes.alone, num_connections=1, in_episodes=True
            )
            num = (sizes.warm, sizes.json, sizes.streams, sizes.paced)
            costs["lightning"] = measure(bench, "lightning", ours, num, ours=True)
            if not chosen.only_json_and_streams:
                bench.run(
                    "lightning: 256 connections", ours, sizes.crowd, num_connections=256, in_episodes=True
                )
                bench.run(
                    "lightning: JSON, 4 connections",
                    ours,
                    sizes.json // 4,
                    num_connections=4,
                    in_episodes=True,
                )
                beside_huge_answers(bench, ours, sizes)
                first_mb, last_mb = soak(bench, ours, sizes)
        costs["direct"] = measure(bench, "direct", engine, num, ours=False)
        if chosen.litellm is not None:
            with start_litellm(chosen.folder, engine, chosen.litellm, answers.MODEL) as litellm:
                num = (16, sizes.litellm_json, sizes.litellm_streams, sizes.litellm_paced)
                costs["litellm"] = measure(bench, "litellm", litellm, num, ours=False)
    wrong = log_check.faults(database, bench.recorded, bench.huge)
    print(
        f"\n{len(bench.recorded)} calls made through the proxy; the log: {'exact' if not wrong else 'WRONG'}"
    )
    for line in (*bench.errors, *wrong[:10]):
        print(f"  {line}")
    print_table(costs)
    if first_mb is not None:
        print(
            f"resident memory: {first_mb:.0f} MB after {sizes.first_look} calls of the soak, "
            f"{last_mb:.0f} MB after {sizes.soak}"
        )
    theirs = costs.get("litellm")
    mine = costs["lightning"]
    print(
        json.dumps(
            {
                "json_cpu_ms": round(mine.json, 3),
                "stream_cpu_ms": round(mine.stream, 3),
                "paced_stream_cpu_ms": round(mine.paced, 3),
                "litellm_json_cpu_ms": theirs and round(theirs.json, 2),
                "litellm_stream_cpu_ms": theirs and round(theirs.stream, 2),
                "litellm_paced_stream_cpu_ms": theirs and round(theirs.paced, 2),
                "direct_p50_ms": round(direct.p50_ms, 3),
                "proxied_p50_ms": round(alone.p50_ms, 3),
                "errors": bench.num_errors + len(wrong),
                "rss_mb": last_mb and round(last_mb),
            }
        )
    )
    return 1 if bench.num_errors or wrong else 0


def print_table(costs: dict[str, Costs]) -> None:
    print(f"\n{'CPU ms per call, whole process':32} {'JSON':>10} {'stream':>10} {'paced':>10}")
    for name, cost in costs.items():
        shown = "the engine itself (direct)" if name == "direct" else name
        print(f"{shown:32} {cost.json:10.3f} {cost.stream:10.3f} {cost.paced:10.3f}")
    if "litellm" in costs:
        ours, theirs = costs["lightning"], costs["litellm"]
        print(
            f"{'litellm / lightning':32} {theirs.json / ours.json:9.1f}x {theirs.stream / ours.stream:9.1f}x "
            f"{theirs.paced / ours.paced:9.1f}x"
        )


if __name__ == "__main__":
    sys.exit(main())
