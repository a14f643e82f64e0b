"""The evaluation gate: the command, the door through which it asks the candidate, and what its end means."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_engine import BASE, FakeEngine, trained_version, write_folder
from fakes.fake_vllm import FakeVllm
from fakes.own_gate import OwnGate
from fakes.running_proxy import Answer, ask, running_proxy
from fakes.waiting import until, wait_until

from lightning_rl.errors import SettingsError
from lightning_rl.proxy.app import ProxyApp
from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.live.served import UnservedVersionError
from lightning_rl.proxy.publishing import evaluation
from lightning_rl.proxy.publishing.evaluation import Door, check_command, numbers_in, run_command
from lightning_rl.proxy.publishing.place import Handle, Place
from lightning_rl.proxy.publishing.publisher import Publisher
from lightning_rl.records import PolicyVersion, VersionStatus, WeightsKind
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import add_candidate, load_version, set_version_status
from lightning_rl.store.promotion import ask_for_version
from lightning_rl.store.verdicts import verdict_words

LORA, FULL = WeightsKind.LORA, WeightsKind.FULL
CHAT = "/v1/chat/completions"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ran(code: str, timeout_sec: float = 60.0) -> evaluation.Ran:
    return asyncio.run(run_command(python(code), os.environ, timeout_sec))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


# --- the command ---


def test_what_a_command_says_is_kept() -> None:
    found = ran(
        'import sys; print(\'hello\'); print(\'{"accuracy": 0.25, "n": 40, "name": "x", "ok": true}\');'
        "print('bye'); print('oh', file=sys.stderr); sys.exit(3)"
    )
    assert found.exit_code == 3
    assert found.numbers == {"accuracy": 0.25, "n": 40}
    assert {"hello", "bye", "oh"} <= set(found.output.split())


def test_only_the_end_of_long_output_is_kept_and_its_last_numbers() -> None:
    found = ran(
        "import json\nfor i in range(20000): print(json.dumps({'i': i}))\n"
        "print('{\"a\": NaN}')\nprint('the end')"
    )
    assert found.exit_code == 0
    assert len(found.output.encode()) <= evaluation.KEPT_BYTES
    assert found.output.endswith("the end\n")
    assert found.numbers == {"i": 19999}


def test_a_command_and_its_children_are_killed_at_the_time_out(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "print('waiting', flush=True); time.sleep(600)"
    )

    async def scenario() -> evaluation.Ran:
        running = asyncio.create_task(run_command(python(code), os.environ, 3600.0))
        await until(pids.exists)
        running.cancel()  # the proxy ends, or the engine went away
        await asyncio.gather(running, return_exceptions=True)
        return await run_command(python("import time; time.sleep(600)"), os.environ, 0.2)

    found = asyncio.run(scenario())
    assert found.exit_code is None
    both = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(map(is_alive, both)))


def test_a_child_left_behind_neither_holds_up_the_verdict_nor_stays() -> None:
    found = ran(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('{\"pid\": %d}' % child.pid)"
    )
    assert found.exit_code == 0
    wait_until(lambda: not is_alive(int(found.numbers["pid"])))


def test_numbers_are_those_of_the_last_line_that_has_any() -> None:
    assert numbers_in('{"a": 1}\n{"b": "no"}\n[1]\n{broken') == {"a": 1}
    assert numbers_in("nothing") == {}


def test_a_command_that_is_not_there_is_one_line_at_the_start() -> None:
    with pytest.raises(SettingsError, match=r"evaluation\.command.*'no-such-program'"):
        check_command("no-such-program --fast")
    check_command(f"{sys.executable} eval.py")
    with pytest.raises(SettingsError, match="names no program"):
        ProxySettings.load(evaluation={"command": " "})
    with pytest.raises(SettingsError, match="not a command line"):
        ProxySettings.load(evaluation={"command": "sh -c 'x"})


# --- the gate in the publisher ---


class World:
    """A publisher with an evaluation and a fake engine. `during`: told of the version at its door."""

    def __init__(self, folder: Path, code: str, timeout_sec: float = 60.0) -> None:
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.engine = FakeEngine(folder / "base")
        self.database = Database.open(f"sqlite:///{folder / 'log.db'}")
        self.doors: list[tuple[int, str, str]] = []
        self.during: Callable[[PolicyVersion, str], Coroutine[Any, Any, None]] | None = None
        script = folder / "eval.py"
        script.write_text(code)
        self.settings = ProxySettings.load(
            evaluation={"command": f"{sys.executable} {script}", "timeout_sec": timeout_sec}
        )
        self.restart_proxy()

    def restart_proxy(self) -> None:
        self.live = LivePolicies("policy", {}, Gate())
        self.engines = Engines(self.settings.engine_url)
        place = Place(
            [Handle(self.engine, self.engines.all[0])], self.engines, self.live, OwnGate(self.live), 0.2
        )
        self.publisher = Publisher(self.database, place, self.settings, open_door=self.open_door)

    @contextlib.asynccontextmanager
    async def open_door(self, version: PolicyVersion, model: str) -> AsyncIterator[Door]:
        with self.database.read() as conn:
            row = load_version(conn, version.policy, version.version)
        assert row is not None
        self.doors.append((version.version, model, row.status))
        if self.during is not None:
            await self.during(version, model)
        yield Door("http://door/v1", "the-key", f"eval-{version.version}")

    def candidate(self, version: int, kind: WeightsKind) -> None:
        with self.database.write() as conn:
            add_candidate(conn, trained_version(self.folder, version, kind))

    def row(self, version: int) -> PolicyVersion:
        with self.database.read() as conn:
            found = load_version(conn, "policy", version)
        assert found is not None
        return found

    async def step(self) -> None:
        self.publisher.rotation.hurry()
        await self.publisher.step()


def run(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        asyncio.run(scenario())
    finally:
        world.database.close()


TELLS = """
import json, os
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "LIGHTNING_POLICY", "LIGHTNING_VERSION")
print(" ".join(os.environ[name] for name in names), "LIGHTNING_PROXY_TOKEN" in os.environ)
print(json.dumps({"accuracy": 0.75}))
"""


@pytest.mark.parametrize("kind", [LORA, FULL])
def test_a_version_that_passes_goes_live_with_the_numbers_in_its_verdict(
    tmp_path: Path, kind: WeightsKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_PROXY_TOKEN", "secret")
    world = World(tmp_path, TELLS)

    async def scenario() -> None:
        world.candidate(1, kind)
        await world.step()
        assert world.row(1).status is VersionStatus.LIVE
        verdict = world.row(1).verdict
        assert verdict is not None
        assert verdict["result"] == "follows"
        assert verdict["evaluation"]["numbers"] == {"accuracy": 0.75}
        assert verdict["evaluation"]["exit_code"] == 0
        assert "http://door/v1 the-key policy policy 1 False" in verdict["evaluation"]["output"]
        doors = [(1, "policy@1" if kind is LORA else BASE, "evaluating")]
        assert world.doors == doors
        for version in (0, 1):  # back to the base model, and to the version again
            with world.database.write() as conn:
                ask_for_version(conn, "policy", version, "promote", source="test")
            await world.step()
        assert world.row(1).status is VersionStatus.LIVE
        again = world.row(1).verdict
        assert again is not None
        assert again["evaluation"] == verdict["evaluation"]
        assert world.doors == doors

    run(world, scenario)


@pytest.mark.parametrize("kind", [LORA, FULL])
def test_a_version_that_fails_never_serves_anybody_else(tmp_path: Path, kind: WeightsKind) -> None:
    world = World(tmp_path, "print('{\"accuracy\": 0.1}'); print('too low'); raise SystemExit(1)")
    served: list[int | None] = []
    held: list[asyncio.Task[Any]] = []

    async def others(version: PolicyVersion, model: str) -> None:
        if kind is LORA:  # the old version keeps serving, and nobody gets the new one by its name
            served.append(world.live.resolve("policy", "somebody").version)
            with pytest.raises(UnservedVersionError):
                world.live.resolve(model, None)
        else:  # calls wait
            held.append(asyncio.create_task(world.live.admit("policy", "somebody")))
            await asyncio.sleep(0.01)
            assert not held[0].done()

    world.during = others

    async def scenario() -> None:
        await world.step()
        world.candidate(1, kind)
        await world.step()
        row = world.row(1)
        assert row.status is VersionStatus.REJECTED
        assert row.verdict is not None
        assert row.verdict["reason"] == "its evaluation ended with exit code 1: too low"
        assert row.verdict["evaluation"]["numbers"] == {"accuracy": 0.1}
        for task in held:
            lease = await task
            served.append(lease.served.version)
            lease.release()
        assert served == [0]
        assert world.engine.weight == 0.0
        assert world.engine.adapters == {}
        assert world.live.gate.is_open

    run(world, scenario)


@pytest.mark.slow
def test_a_command_that_does_not_end_rejects(tmp_path: Path) -> None:
    world = World(tmp_path, "print('thinking', flush=True)\nimport time; time.sleep(600)", timeout_sec=1.5)

    async def scenario() -> None:
        world.candidate(1, LORA)
        await world.step()
        verdict = world.row(1).verdict
        assert world.row(1).status is VersionStatus.REJECTED
        assert verdict is not None
        assert verdict["reason"].startswith("its evaluation did not end within 1.5 s")
        assert verdict["evaluation"]["exit_code"] is None

    run(world, scenario)


def test_an_evaluation_ends_with_the_engine_and_is_done_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "LOOK_SEC", 0.01)
    flag = tmp_path / "again"
    world = World(
        tmp_path,
        f"import pathlib, time\nflag = pathlib.Path({str(flag)!r})\n"
        "if not flag.exists(): flag.touch(); time.sleep(600)",
    )

    async def restart_engine() -> None:
        await until(flag.exists)
        world.engine.restart()

    async def scenario() -> None:
        world.candidate(1, LORA)
        restarting = asyncio.create_task(restart_engine())
        await world.step()
        await restarting
        assert world.row(1).status is VersionStatus.EVALUATING
        await world.step()
        assert world.row(1).status is VersionStatus.LIVE
        assert len(world.doors) == 2

    run(world, scenario)


def test_the_next_owner_evaluates_anew_what_a_killed_proxy_left(tmp_path: Path) -> None:
    world = World(tmp_path, "")

    async def scenario() -> None:
        world.candidate(1, LORA)
        with world.database.write() as conn:
            set_version_status(conn, "policy", 1, VersionStatus.EVALUATING, source="test")
        await world.engine.load_lora("policy@1", str(world.row(1).path))
        world.restart_proxy()
        await world.step()
        assert world.row(1).status is VersionStatus.LIVE
        assert world.doors == [(1, "policy@1", "evaluating")]

    run(world, scenario)


# --- the door of a real proxy ---


def body(model: str | None = "policy", **more: Any) -> bytes:
    said = {} if model is None else {"model": model}
    return json.dumps({**said, "messages": [{"role": "user", "content": "hi"}], **more}).encode()


def through_the_door(
    tmp_path: Path, calls: Callable[[str, str, str], Coroutine[Any, Any, None]], kind: WeightsKind = LORA
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of calls and episodes after `calls`(the proxy's URL, the door's, the key) on a version 7."""
    engine = FakeVllm(models=["base", "policy@7"])
    failed: list[BaseException] = []
    done: list[bool] = []

    async def evaluate(app: ProxyApp) -> None:
        await until(lambda: app.live.base_model is not None)
        version = trained_version(tmp_path, 7, kind)
        try:
            async with app.open_evaluation(version, "policy@7" if kind is LORA else BASE) as door:
                await calls(url_of[0], door.base_url.removesuffix("/v1"), door.key)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            done.append(True)

    url_of: list[str] = []

    async def start(app: ProxyApp) -> None:
        await until(lambda: url_of)
        await evaluate(app)

    with running_proxy(tmp_path, engine, more=[start]) as running:
        url_of.append(running.url)
        wait_until(lambda: done)
        if failed:
            raise failed[0]
        return running.rows("calls"), running.rows("episodes")


async def asked(root: str, path: str, sent: bytes | None, key: str | None = None) -> Answer:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await asyncio.to_thread(ask, root, path, sent, headers)


def test_calls_at_the_door_are_the_candidates_and_of_eval_episodes(tmp_path: Path) -> None:
    async def calls(proxy: str, door: str, key: str) -> None:
        assert (await asked(door, CHAT, body(), key)).status == 200
        assert (await asked(door, CHAT, body("gpt-4o"), key)).status == 200
        assert (await asked(door, "/episodes/mine" + CHAT, body("policy@7"), key)).status == 200
        assert (await asked(proxy, "/episodes/other" + CHAT, body())).status == 200
        assert (await asked(proxy, CHAT, body("policy@7"))).status == 404
        assert (await asked(proxy, "/tokenize", b'{"model": "policy@7", "prompt": "x"}')).status == 404

    rows, episodes = through_the_door(tmp_path, calls)
    assert [(row["policy_version"], row["served_model"]) for row in rows] == [(7, "policy@7")] * 3 + [
        (0, "base")
    ]
    assert all(row["policy_version"] == row["policy_version_end"] for row in rows)
    of_episode = {row["id"]: row for row in episodes}
    named = rows[0]["episode_id"]
    assert named == rows[1]["episode_id"]
    assert named.startswith("eval-policy-7-")
    assert rows[0]["attribution_rule"] == "evaluation"
    assert {name: row["purpose"] for name, row in of_episode.items()} == {
        named: "eval",
        "mine": "eval",
        "other": "train",
    }
    assert {name: row["status"] for name, row in of_episode.items()} == {
        named: "ended",
        "mine": "running",
        "other": "running",
    }


def test_beside_full_weights_no_other_version_answers_at_the_door(tmp_path: Path) -> None:
    async def calls(proxy: str, door: str, key: str) -> None:
        assert (await asked(door, CHAT, body(), key)).status == 200
        assert (await asked(door, CHAT, body(BASE), key)).status == 200
        refused = await asked(door, CHAT, body("policy@0"), key)
        assert refused.status == 404
        assert b"'policy@0' serves no calls while full weights of 'policy@7'" in refused.body

    rows, _ = through_the_door(tmp_path, calls, FULL)
    assert [row["policy_version"] for row in rows if row["status"] == "complete"] == [7, 7]


def test_beside_an_adapter_the_version_below_it_answers_at_the_door(tmp_path: Path) -> None:
    async def calls(proxy: str, door: str, key: str) -> None:
        assert (await asked(door, CHAT, body("policy@0"), key)).status == 200

    rows, _ = through_the_door(tmp_path, calls)
    assert [(row["policy_version"], row["served_model"]) for row in rows] == [(0, "base")]


def test_the_door_opens_for_its_key_alone_and_is_gone_afterwards(tmp_path: Path) -> None:
    door_url: list[str] = []

    async def calls(proxy: str, door: str, key: str) -> None:
        door_url.append(door)
        assert (await asked(door, CHAT, body())).status == 401
        assert (await asked(door, CHAT, body(), "wrong")).status == 401
        assert (await asked(door, CHAT, body(), key)).status == 200
        assert (await asked(door, "/lightning/api/status", None, key)).status == 404
        models = json.loads((await asked(door, "/v1/models", None, key)).body)
        assert [card["id"] for card in models["data"]] == ["base", "policy@7", "policy"]

    rows, _ = through_the_door(tmp_path, calls)
    assert len(rows) == 1
    with pytest.raises(ConnectionRefusedError):
        ask(door_url[0], CHAT, body())


def test_an_episode_for_training_that_an_evaluation_calls_in_is_trained_no_more(tmp_path: Path) -> None:
    async def calls(proxy: str, door: str, key: str) -> None:
        assert (await asked(proxy, "/episodes/e" + CHAT, body())).status == 200
        assert (await asked(door, "/episodes/e" + CHAT, body(), key)).status == 200

    rows, episodes = through_the_door(tmp_path, calls)
    assert [row["policy_version"] for row in rows] == [0, 7]
    assert [row["purpose"] for row in episodes] == ["eval"]


def test_the_evaluations_calls_pass_while_all_others_are_held(tmp_path: Path) -> None:
    async def calls(proxy: str, door: str, key: str) -> None:
        waiting = asyncio.create_task(asked(proxy, CHAT, body()))
        await until(lambda: apps[0].gate.waiting > 0)
        assert (await asked(door, CHAT, body(), key)).status == 200
        assert not waiting.done()
        apps[0].gate.open()
        assert (await waiting).status == 200

    apps: list[ProxyApp] = []
    before = ProxyApp.open_evaluation

    def opened(self: ProxyApp, version: PolicyVersion, model: str) -> Any:
        apps.append(self)
        self.gate.hold()
        return before(self, version, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProxyApp, "open_evaluation", opened)
        rows, _ = through_the_door(tmp_path, calls)
    assert sorted(row["policy_version"] for row in rows) == [0, 7]


def test_the_numbers_are_shown_with_the_verdict() -> None:
    verdict = {
        "result": "follows",
        "slope": 1.0,
        "gap_rms": 0.001,
        "evaluation": {"numbers": {"accuracy": 0.5}},
    }
    assert verdict_words(verdict) == "follows (slope 1.00, gap 0.001); accuracy 0.5"
