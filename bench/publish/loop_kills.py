"""Part loop: `lightning train --watch --resume latest` is killed at random moments; its versions go live.

Needs a proxy that publishes to a real engine, and the log of both. Fills the log by itself: groups of short
episodes through the proxy, each by the version that is live. At the end, what the manifests say was trained
is compared with what should have been: every choice of every group whose rewards differ, once.

    PYTHONPATH=bench python -m publish.loop_kills --db URL --proxy URL --model FOLDER [--kills 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import httpx
import sqlalchemy as sa

from lightning_rl.records import VersionStatus
from lightning_rl.store.database import Database
from lightning_rl.store.policies import WAITING, versions

GROUPS_PER_STEP = 2
EPISODES = 2
AHEAD = 2 * GROUPS_PER_STEP
"""Groups that wait for the trainer before the next is played: it never waits for long."""
TIMEOUT_SEC = 300.0
_SERVED = (VersionStatus.LIVE, VersionStatus.DRAINING, VersionStatus.RETIRED)


@dataclass
class LoopKills:
    kills: int = 0
    killed_in: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0  # choices that were trained more than once
    gaps: int = 0  # choices that should have been trained and were not
    strays: int = 0  # choices that were trained and should not have been
    versions: int = 0  # that went live
    choices: int = 0  # that should have been trained
    runs: int = 0  # 1: every process went on with the first one's run
    seconds: float = 0.0

    @property
    def is_met(self) -> bool:
        return not (self.duplicates or self.gaps or self.strays) and self.runs == 1 and self.versions > 0


class Feed(Protocol):
    """Where groups come from. Gives the names of the group's episodes, which have ended and are rewarded."""

    def play(self, number: int, rewards: list[float]) -> list[str]: ...


class ThroughProxy:
    """Episodes of one short call each."""

    def __init__(self, url: str, *, max_tokens: int = 6) -> None:
        self._url, self._max_tokens = url, max_tokens
        self._http = httpx.Client(timeout=120)

    def play(self, number: int, rewards: list[float]) -> list[str]:
        names = [f"loop-{number}-{i}" for i in range(len(rewards))]
        for name in names:
            about = {"episode": name, "task": f"loop-{number}", "batch": "loop", "expected_size": len(names)}
            self._post("/lightning/api/episodes", about)
        for name, reward in zip(names, rewards, strict=True):
            question = [{"role": "user", "content": f"Name {number} things."}]
            body = {
                "model": "gpt-4o",
                "messages": question,
                "max_tokens": self._max_tokens,
                "temperature": 1.0,
            }
            self._post(f"/episodes/{name}/v1/chat/completions", body)
            said = {"episode": name, "value": reward, "source": "bench", "final": True}
            self._post("/lightning/api/rewards", said)
        return names

    def _post(self, path: str, body: object) -> None:
        answer = self._http.post(self._url + path, json=body)
        if answer.status_code >= 400:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")


def loop_kills(
    db_url: str,
    model: Path,
    kills: int,
    seed: int,
    *,
    proxy_url: str,
    on_each: Callable[[str], None] = lambda what: None,
) -> LoopKills:
    """`model`: the folder that the engine serves. The log holds no run of the policy yet."""
    with tempfile.TemporaryDirectory(prefix="lightning-loop-") as folder:
        return play(
            db_url, model, ThroughProxy(proxy_url), Path(folder), kills=kills, seed=seed, on_each=on_each
        )


def play(
    db_url: str,
    model: Path,
    feed: Feed,
    folder: Path,
    *,
    kills: int,
    seed: int,
    on_each: Callable[[str], None] = lambda what: None,
) -> LoopKills:
    began = time.monotonic()
    found, chance = LoopKills(), Random(seed)
    log = _Log(Database.open(db_url))
    command = _command(db_url, model, folder)
    with _feeding(feed, log, chance.randrange(2**32)) as fed:
        cycle_sec = 3.0
        for number in range(kills):
            with _trainer(command, folder / "train.log") as process:
                log.wait(process, lambda pid=process.pid: log.owner() == pid)
                begins, done = time.monotonic(), log.steps()
                if number == 0:  # one whole step, to know how long one takes
                    log.wait(process, lambda done=done: log.steps() > done)
                    cycle_sec = time.monotonic() - begins
                # From the first moment that the run is this process's to about two steps further.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(0, 2 * cycle_sec))
                    raise RuntimeError(f"the trainer ended by itself: {_tail(folder / 'train.log')}")
                at = log.moment()
                process.kill()
                process.wait()
            found.kills += 1
            found.killed_in[at] += 1
            on_each(f"kill {found.kills} of {kills}: {at}, after {log.steps()} steps")
        fed.end()
        with _trainer(command, folder / "train.log") as process:
            wanted = fed.wanted(log)
            log.wait(process, lambda: wanted <= log.trained().keys() and not log.is_waiting())
            process.terminate()
            if process.wait(60) != 130:
                raise RuntimeError(f"the trainer did not stop in order: {_tail(folder / 'train.log')}")
    trained = log.trained()
    found.choices = len(wanted)
    found.duplicates = sum(count > 1 for count in trained.values())
    found.gaps = len(wanted - trained.keys())
    found.strays = len(trained.keys() - wanted)
    found.versions, found.runs = log.served(), log.runs()
    found.seconds = time.monotonic() - began
    log.database.close()
    return found


Choice = tuple[str, int]  # call id, index


class _Log:
    """What the bench asks of the log."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def wait(self, process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SEC
        while not until():
            if process.poll() is not None:
                raise RuntimeError(f"the trainer ended by itself, with exit status {process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has come of it in {TIMEOUT_SEC:.0f} s ({self.moment()})")
            time.sleep(0.02)

    def owner(self) -> int | None:
        pid = self._one("SELECT owner_pid FROM runs WHERE status = 'running' ORDER BY id DESC LIMIT 1")
        return None if pid is None else int(pid)

    def steps(self) -> int:
        return int(self._one("SELECT count(*) FROM step_manifests WHERE trained_at_ms IS NOT NULL"))

    def runs(self) -> int:
        return int(self._one("SELECT count(*) FROM runs"))

    def ready(self, episodes: int) -> int:
        """Of so many played episodes, the groups that no manifest has."""
        return (episodes - int(self._one("SELECT count(*) FROM manifest_episodes"))) // EPISODES

    def moment(self) -> str:
        """Where the run is."""
        if self.is_waiting():
            return "while its version waited"
        if self._one("SELECT count(*) FROM step_manifests WHERE trained_at_ms IS NULL"):
            return "in a step"
        return "between two steps"

    def is_waiting(self) -> bool:
        with self.database.read() as conn:
            return any(version.status in WAITING for version in versions(conn, "policy"))

    def served(self) -> int:
        with self.database.read() as conn:
            return sum(version.status in _SERVED for version in versions(conn, "policy"))

    def trained(self) -> Counter[Choice]:
        """How often each choice was trained, by finished steps."""
        query = (
            "SELECT c.call_id, c.choice_index FROM manifest_choices c JOIN step_manifests s"
            " ON s.run_id = c.run_id AND s.step = c.step"
            " WHERE s.trained_at_ms IS NOT NULL AND c.advantage IS NOT NULL"
        )
        with self.database.read() as conn:
            return Counter((row[0], row[1]) for row in conn.execute(sa.text(query)))

    def choices_of(self, episodes: list[str]) -> set[Choice]:
        query = sa.text(
            'SELECT h.call_id, h."index" FROM choices h JOIN calls c ON c.id = h.call_id'
            " WHERE c.episode_id IN :names"
        ).bindparams(sa.bindparam("names", expanding=True))
        with self.database.read() as conn:
            return {(row[0], row[1]) for row in conn.execute(query, {"names": episodes})}

    def _one(self, query: str) -> object:
        with self.database.read() as conn:
            return conn.execute(sa.text(query)).scalar()


class _Fed:
    """Groups played by a thread of their own, a few ahead of the trainer, in whole steps."""

    def __init__(self, feed: Feed, log: _Log, seed: int) -> None:
        self._feed, self._log, self._chance = feed, log, Random(seed)
        self._over = threading.Event()
        self._fault: Exception | None = None
        self._varied: list[str] = []  # episodes of groups whose rewards differ
        self._num_episodes = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    def wanted(self, log: _Log) -> set[Choice]:
        return log.choices_of(self._varied)

    def _run(self) -> None:
        try:
            number = 0
            while not self._over.is_set():
                if self._log.ready(self._num_episodes) >= AHEAD:
                    self._over.wait(0.05)
                    continue
                for _ in range(GROUPS_PER_STEP):
                    rewards = [float(self._chance.randrange(2)) for _ in range(EPISODES)]
                    names = self._feed.play(number, rewards)
                    number += 1
                    self._num_episodes += len(names)
                    self._varied += names if len(set(rewards)) > 1 else []
        except Exception as fault:  # noqa: BLE001 - of a thread: raised where it is joined
            self._fault = fault


@contextlib.contextmanager
def _feeding(feed: Feed, log: _Log, seed: int) -> Iterator[_Fed]:
    fed = _Fed(feed, log, seed)
    try:
        yield fed
    finally:
        fed.end()


def _command(db_url: str, model: Path, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "lightning_rl.cli", "train", "--watch", "--resume", "latest"),
        *("--db", db_url, "--model", str(model), "--output", str(folder / "runs")),
        *("--weights", "lora", "--lora-rank", "4", "--learning-rate", "0.001"),
        *("--groups-per-step", str(GROUPS_PER_STEP), "--no-progress"),
    ]


@contextlib.contextmanager
def _trainer(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        except Exception as fault:
            raise RuntimeError(f"{fault}: {_tail(log)}") from fault
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", required=True, help="the log's database URL")
    parser.add_argument("--proxy", required=True, help="the proxy's root URL")
    parser.add_argument("--model", required=True, type=Path, help="the folder that the engine serves")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = loop_kills(given.db, given.model, given.kills, given.seed, proxy_url=given.proxy, on_each=print)
    for name, value in asdict(found).items():
        print(f"{name:>12}  {value}")
    print(json.dumps({"loop_kills": found.kills, "duplicates": found.duplicates, "gaps": found.gaps}))
    return 0 if found.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
