"""`make crash-test`: kill -9 of the proxy at random instants under load, and what the log holds afterwards.

Last line: {"kills", "delivered", "missing", "verify_failures", "database"}; exit code 1 if an answer whose
end a client saw is missing or inexact, a row explains nothing, `db verify` finds a fault, or the same test
loses nothing with the holding switched off (it would prove nothing then).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from check import ignore_interrupts
from fakes.postgres_server import PostgresMissingError, PostgresServer
from lane import Lane, Tally
from processes import running_engine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

COLUMNS = (
    ("kills", "kills"),
    ("server_crashes", "server crashes"),
    ("sent", "calls sent"),
    ("delivered", "ends seen"),
    ("missing", "missing"),
    ("inexact", "inexact"),
    ("cut", "cut off"),
    ("open_rows", "open rows"),
    ("intents_missing", "intents missing"),
    ("unexplained", "unexplained"),
    ("verify_failures", "verify failures"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sqlite-kills", type=int, default=200)
    parser.add_argument("--postgres-kills", type=int, default=50)
    parser.add_argument("--write-behind-kills", type=int, default=30)
    parser.add_argument(
        "--sqlite-lanes", type=int, default=2, help="logs that are under load at the same time"
    )
    return parser.parse_args()


async def play(options: argparse.Namespace, folder: Path, server: PostgresServer | None) -> dict[str, Tally]:
    names = itertools.count()
    wanted = options.sqlite_kills + options.write_behind_kills + (options.postgres_kills if server else 0)
    with (
        running_engine(folder) as (engine_url, record),
        ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=ignore_interrupts) as pool,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("kills", total=wanted)

        def lane(name: str, durability: str, **more: Any) -> Lane:
            own = folder / name
            own.mkdir()
            parts: dict[str, Any] = {"new_log": lambda: f"sqlite:///{own}/log{next(names)}.db"} | more
            return Lane(
                name,
                own,
                engine_url,
                record,
                durability,
                pool=pool,
                on_kill=lambda: bar.advance(task),
                **parts,
            )

        lanes = [lane(f"sqlite{i}", "commit") for i in range(options.sqlite_lanes)]
        share = -(-options.sqlite_kills // len(lanes))
        work = [one.run(share) for one in lanes]
        if server is not None:
            postgres = lane("postgres", "commit", new_log=server.new_database, server=server, crash_every=4)
            lanes.append(postgres)
            work.append(postgres.run(options.postgres_kills))
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
        loose = lane("write-behind", "write-behind")
        lanes.append(loose)
        await loose.run(options.write_behind_kills)
    return {one.name: one.tally for one in lanes}


def show(tallies: dict[str, Tally], took_sec: float) -> None:
    table = Table("", *(title for _, title in COLUMNS), title=f"kill -9 under load, {took_sec:.0f} s")
    for name, tally in tallies.items():
        values = (getattr(tally, column) for column, _ in COLUMNS)
        table.add_row(name, *(str(len(v) if isinstance(v, list) else v) for v in values))
    Console(width=150).print(table)
    for name, tally in tallies.items():
        for what in ("missing", "inexact", "unexplained", "intents_missing", "faults"):
            listed = getattr(tally, what)
            if listed and (name != "write-behind" or what not in ("missing",)):
                print(f"{name}: {what}: {', '.join(listed[:5])}")


def main() -> int:
    options = arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lightning-crash-") as name:
        try:
            with PostgresServer() as server:
                tallies = asyncio.run(play(options, Path(name), server))
        except PostgresMissingError as error:
            print(f"without Postgres: {error}", file=sys.stderr)
            tallies = asyncio.run(play(options, Path(name), None))
    show(tallies, time.monotonic() - began)
    loose = tallies.pop("write-behind")
    held = list(tallies.values())
    lost = [call for tally in held for call in (*tally.missing, *tally.inexact)]
    odd = [row for tally in held for row in (*tally.unexplained, *tally.intents_missing)]
    failures = sum(tally.verify_failures for tally in held)
    proves = bool(loose.missing) or not options.write_behind_kills
    print(
        f"with durability = write-behind: {loose.kills} kills, {loose.delivered} ends seen, "
        f"{len(loose.missing)} missing{'' if proves else ': it should have lost some'}"
    )
    result = {
        "kills": sum(tally.kills for tally in held),
        "delivered": sum(tally.delivered for tally in held),
        "missing": len(lost),
        "verify_failures": failures,
        "unexplained": len(odd),
        "server_crashes": sum(tally.server_crashes for tally in held),
        "write_behind": {"kills": loose.kills, "delivered": loose.delivered, "missing": len(loose.missing)},
        "database": ["sqlite", *(["postgres"] if "postgres" in tallies else [])],
    }
    print(json.dumps(result))
    return 1 if lost or odd or failures or not proves else 0


if __name__ == "__main__":
    sys.exit(main())
