"""`make bench-store`: how large the log is, what it stands, and how long a million calls take to look at.

Last line: {"size_ratio", "logprob_bytes_share", "locked_errors", "lost_rows", "million_calls_ms"}; exit code
1 if a promise is broken (5 times smaller, nothing locked or lost, a second, no full scan of calls).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))  # its agents, its engine and its proxies

import million
from contention import Contended, contend
from fakes.postgres_server import PostgresMissingError, PostgresServer
from fakes.query_plans import full_scans
from fill import fill
from million import Timed
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from size import Size, measure

from lightning_rl.store.database import Database

ENOUGH_TIMES_SMALLER = 5.0
LONGEST_MS = 1000.0

out = Console(highlight=False, width=130)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short: for development, no figures")
    parser.add_argument("--episodes", type=int, help="of the size test (200)")
    parser.add_argument("--seconds", type=float, help="of the contention on each database (60)")
    parser.add_argument("--calls", type=int, help="of the large log (1,000,000)")
    parser.add_argument("--no-postgres", action="store_true", help="SQLite alone")
    parser.add_argument("--parts", default="size,contention,million", help="which of the three to run")
    options = parser.parse_args()
    small = options.quick
    options.episodes = options.episodes or (10 if small else 200)
    options.seconds = options.seconds or (8.0 if small else 60.0)
    options.calls = options.calls or (20_000 if small else 1_000_000)
    return options


def main() -> int:
    options = arguments()
    parts = options.parts.split(",")
    result: dict[str, Any] = {}
    broken: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-bench-store-")))
        server = stack.enter_context(_server(options.no_postgres))
        if "size" in parts:
            size = measure(folder, options.episodes)
            _show_size(size)
            result |= {
                "size_ratio": round(size.ratio, 2),
                "logprob_bytes_share": round(size.logprob_share, 4),
            }
            if size.differences:
                broken.append(f"{size.differences} calls were read back other than they were written")
            if size.ratio < ENOUGH_TIMES_SMALLER and not options.quick:
                broken.append(f"only {size.ratio:.2f} times smaller")
        if "contention" in parts:
            found = [
                asyncio.run(contend(*where, options.seconds)) for where in _places(folder, server, "busy")
            ]
            _show_contention(found)
            result |= {
                "locked_errors": sum(one.locked_errors for one in found),
                "lost_rows": sum(one.lost_rows for one in found),
                "contended": [one.database for one in found],
            }
            if result["locked_errors"] or result["lost_rows"]:
                broken.append("rows were lost, or somebody found the database locked")
        if "million" in parts:
            figures = {}
            for name, url, _ in _places(folder, server, "large"):
                figures[name] = _look(name, url, options.calls, broken)
            result |= {"million_calls_ms": figures["sqlite"]}
            if "postgres" in figures:
                result |= {"million_calls_postgres_ms": figures["postgres"]}
    for line in broken:
        out.print(f"broken: {line}", style="red")
    print(json.dumps(result))
    return 1 if broken else 0


@contextmanager
def _server(is_off: bool) -> Iterator[PostgresServer | None]:
    try:
        server = None if is_off else PostgresServer()
    except PostgresMissingError as error:
        out.print(f"without Postgres: {error}", style="yellow")
        server = None
    if server is None:
        yield None
        return
    with server:
        yield server


def _places(folder: Path, server: PostgresServer | None, name: str) -> Iterator[tuple[str, str, Path]]:
    """(database, URL, folder for what belongs to it)."""
    yield "sqlite", f"sqlite:///{folder}/{name}.db", folder / f"{name}-sqlite"
    if server is not None:
        yield "postgres", server.new_database(), folder / f"{name}-postgres"


def _look(name: str, url: str, num_calls: int, broken: list[str]) -> dict[str, float]:
    database = Database.open(url)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{name}: {num_calls} calls", total=None)
            took_sec = fill(
                database, num_calls, lambda done, total: progress.update(task, completed=done, total=total)
            )
        found = million.ask(database)
    finally:
        database.close()
    scanning = [plan for timed in found for plan in full_scans(timed.plans)]
    _show_million(f"{name}: {num_calls} calls (made in {took_sec:.0f} s)", found)
    broken += [f"{name}: a full scan of calls: {plan.splitlines()[0]}" for plan in scanning]
    lists = max(timed.ms for timed in found if timed.name.startswith("list"))
    by_name = {timed.name: timed.ms for timed in found}
    figures = {
        "show": round(by_name["show"], 1),
        "list": round(lists, 1),
        "doctor": round(by_name["doctor"], 1),
        "load_step": round(by_name["load_step"], 1),
    }
    slow = {what: ms for what, ms in figures.items() if ms > LONGEST_MS}
    broken += [f"{name}: {what} took {ms:.0f} ms" for what, ms in slow.items()]
    return figures


def _show_size(size: Size) -> None:
    table = Table(
        "", "log", "a copy of each prompt", title=f"{size.calls} calls, {size.prompt_tokens} prompt tokens"
    )
    for name, ours, copied in (
        ("file, bytes", size.log_bytes, size.copies_bytes),
        ("ids of prompts, bytes", size.prompt_bytes, size.copied_prompt_bytes),
        ("requests, bytes", size.body_bytes, size.copied_body_bytes),
        ("logprobs, bytes", size.logprob_bytes, size.logprob_bytes),
    ):
        table.add_row(name, f"{ours:,}", f"{copied:,}")
    out.print(table)
    out.print(f"{size.ratio:.2f} times smaller; {size.differences} calls read back otherwise than written")


def _show_contention(found: list[Contended]) -> None:
    names = (
        "seconds",
        "calls sent",
        "ends seen",
        "rewards",
        "steps read",
        "locked",
        "lost",
        "other failures",
    )
    table = Table("database", *names, title="4 proxies, 64 agents, 8 reward writers, a trainer")
    for one in found:
        figures = (one.seconds, one.sent, one.delivered, one.rewards, one.steps_read)
        counts = (one.locked_errors, one.lost_rows, len(one.failures))
        table.add_row(one.database, *(f"{figure:g}" for figure in (*figures, *counts)))
    out.print(table)
    for line in [line for one in found for line in one.failures][:5]:
        out.print(f"  {line}")


def _show_million(title: str, found: list[Timed]) -> None:
    table = Table("asked", "first, ms", "again, ms", "statements", title=title)
    for timed in found:
        table.add_row(timed.name, f"{timed.first_ms:.1f}", f"{timed.ms:.1f}", str(len(timed.plans)))
    out.print(table)
    read = {
        line.strip()
        for timed in found
        for plan in timed.plans
        for line in plan.splitlines()
        if " calls" in line and ("INDEX" in line or "Scan" in line)
    }
    out.print("how calls are read:")
    for line in sorted(read):
        out.print(f"  {line}")


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
