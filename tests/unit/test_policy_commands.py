"""`lightning policy list|show|diff|promote|rollback` as a person types them, on numbers made by hand."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.fake_engine import trained_version
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import write
from fakes.waiting import wait_until
from typer.testing import CliRunner

from lightning_rl.errors import LightningError
from lightning_rl.records import (
    CallKind,
    ManifestChoice,
    PolicyVersion,
    StepManifest,
    VersionStatus,
    WeightsKind,
    logprobs,
)
from lightning_rl.store import append, policies, runs
from lightning_rl.store.commands import policy_app
from lightning_rl.store.database import Database
from lightning_rl.store.policies import set_version_status
from lightning_rl.store.policy_requests import waiting_request
from lightning_rl.store.policy_view import probe_change

app = typer.Typer()
app.add_typer(policy_app, name="policy")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["policy", *arguments])


def document(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, LightningError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def play(
    database: Database, name: str, version: int, value: float | None, *lengths: int, **more: Any
) -> None:
    """An episode with a call per length, of so many tokens after a prompt of ten."""
    for turn, length in enumerate(lengths):
        call = f"{name}.{turn}"
        write(
            database,
            intent(call, name, version=version, **more),
            end(call, list(range(10)), choice(list(range(length)))),
        )
    if value is not None:
        with database.write() as conn:
            append.add_reward(conn, reward(name, value, final=True))


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """Version 0 served four episodes, 1 two, 2 none (rejected)."""
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    play(opened, "a0", 0, 0.0, 4, 6, task="a")
    play(opened, "a1", 0, 1.0, 5, task="a", tags={"half": "x"})
    play(opened, "b0", 0, 1.0, 5, task="b", tags={"half": "x"})
    play(opened, "b1", 0, None, 20, task="b")
    play(opened, "a2", 1, 1.0, 3, task="a", tags={"half": "x"})
    play(opened, "c0", 1, 0.5, 7, task="c")
    play(opened, "judged", 1, 1.0, 9, kind=CallKind.JUDGE)
    play(opened, "w0", 0, 0.25, 2, policy="writer")
    with opened.write() as conn:
        for number, rate in ((1, 0.5), (2, 0.1)):
            name = f"run{number}"
            runs.create_run(conn, name, "policy", {"learning_rate": rate, "seed": 0}, {})
            runs.add_manifest(conn, manifest(name, number - 1))
            runs.finish_step(conn, name, 0, to_version=number, metrics={})
            policies.add_candidate(conn, made(tmp_path, number, name))
        set_version_status(
            conn,
            "policy",
            1,
            VersionStatus.LIVE,
            verdict={"result": "follows", "slope": 0.98, "gap_rms": 0.0003, "reason": "as it should be"},
            source="publisher",
        )
        verdict = {"result": "other", "reason": "the engine serves other weights"}
        set_version_status(conn, "policy", 2, VersionStatus.REJECTED, verdict=verdict, source="publisher")
    yield opened
    opened.close()


def made(folder: Path, number: int, run_id: str) -> PolicyVersion:
    from dataclasses import replace

    return replace(trained_version(folder, number, WeightsKind.LORA), run_id=run_id, step=0)


def manifest(run_id: str, parent: int) -> StepManifest:
    chosen = tuple(
        ManifestChoice(f"{name}.0", 0, name, f"g-{name[0]}", None, advantage, 1.0, reason)
        for name, advantage, reason in (("a0", -0.5, None), ("a1", 0.5, None), ("b0", None, "no_variance"))
    )
    return StepManifest(run_id, 0, "policy", parent, chosen, {"a0": ("r",)}, {"a0": 0.0, "a1": 1.0})


def test_the_list(database: Database) -> None:
    policy, writer = document("list")["policies"]
    assert policy == {
        "policy": "policy",
        "live_version": 1,
        "kind": "lora",
        "num_versions": 2,
        "num_calls": 8,  # every call that it served, the judge's too
        "num_episodes": 6,
        "reward": {"num": 5, "mean": 3.5 / 5, "se": pytest.approx(math.sqrt(0.8 / 4 / 5))},
    }
    assert (writer["live_version"], writer["kind"], writer["num_versions"]) == (0, None, 0)
    assert "writer  0 (base model)" in run("list").stdout


def test_a_policy_with_its_versions(database: Database) -> None:
    view = document("show", "policy")
    base, first, second = view["versions"]
    assert [one["version"] for one in view["versions"]] == [0, 1, 2]
    assert (base["status"], first["status"], second["status"]) == ("retired", "live", "rejected")
    assert base["served"]["num_calls"] == 5
    assert base["served"]["num_episodes"] == 4
    assert base["served"]["completion_tokens"] == 40 / 5
    assert base["served"]["prompt_tokens"] == 10
    assert base["served"]["turns"]["mean"] == 5 / 4
    assert base["served"]["reward"] == {"num": 3, "mean": 2 / 3, "se": pytest.approx(1 / 3)}
    assert first["served"]["completion_tokens"] == 5, "the judge's call is none of the policy's"
    assert first["trained_on"] == {
        "from_version": 0,
        "num_episodes": 3,
        "num_groups": 2,
        "num_choices": 2,
        "num_left_out": 1,
    }
    assert first["words"] == "follows (slope 0.98, gap 0.0003)"
    assert second["words"] == "the engine serves other weights"
    shown = run("show", "policy").stdout
    assert "3 episodes, 2 groups, 2 choices from 0" in shown
    assert "0.667 ±0.33 (3)" in shown
    assert document("show", "writer")["versions"][0]["served"]["reward"]["mean"] == 0.25


def test_one_version_and_what_was_said_of_it(database: Database) -> None:
    view = document("show", "policy", "1")
    assert [(event["status"], event["source"]) for event in view["events"]] == [
        ("candidate", "run1"),
        ("live", "publisher"),
    ]
    assert view["facts"]["run_id"] == "run1"
    assert "the engine serves other weights" in run("show", "policy", "2").stdout
    assert document("show", "policy", "0")["facts"]["served"]["num_episodes"] == 4
    assert "the base model" in run("show", "policy", "0").stdout


def test_two_versions_compared(database: Database) -> None:
    found = document("diff", "policy", "0", "1")
    (task,) = found["parts"]
    assert (task["name"], task["a"]["mean"], task["b"]["mean"], task["delta"]) == ("a", 0.5, 1.0, 0.5)
    assert (found["num_parts"], found["num_of_one"]) == (1, 2)
    parts = {part["name"]: part for part in document("diff", "policy", "0", "1", "--by-tag", "half")["parts"]}
    assert (parts["x"]["a"]["num"], parts["x"]["delta"]) == (2, 0.0)
    assert (parts[None]["a"]["num"], parts[None]["delta"]) == (1, 0.5)
    assert document("diff", "policy", "1", "2")["settings"] == {"learning_rate": [0.5, 0.1]}
    shown = run("diff", "policy", "0", "1").stdout
    assert "+0.0833" in shown  # (1 + 0.5) / 2 - 2 / 3
    assert "reward by task (2 of one version only)" in shown
    assert "2 of one version only, none of both" in run("diff", "policy", "1", "2").stdout
    assert "KL" in shown


def test_how_far_a_step_moved_the_model() -> None:
    version = trained_version_of(0.0, math.log(2))
    change = probe_change(version)
    assert change is not None
    assert change.num_tokens == 2
    # r = 1 and r = 2: (0 + (2 - 1 - log 2)) / 2
    assert change.kl == pytest.approx((1 - math.log(2)) / 2, rel=1e-5)
    assert change.rms == pytest.approx(math.log(2) / math.sqrt(2), rel=1e-5)


def trained_version_of(*moved: float) -> PolicyVersion:
    from lightning_rl.records import ProbeSequence, token_ids

    before = [-1.0] * len(moved)
    after = [b + m for b, m in zip(before, moved, strict=True)]
    probe = ProbeSequence(token_ids(range(len(moved) + 1)), logprobs(before), logprobs(after))
    return PolicyVersion(
        "p", 1, VersionStatus.LIVE, WeightsKind.LORA, None, None, (probe,), None, None, None, 0
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("show", "nobody"), "the log holds no policy 'nobody'; it holds policy, writer"),
        (("show", "policy", "9"), "policy 'policy' has no version 9; it has 1, 2"),
        (("diff", "policy", "0", "7"), "has no version 7"),
        (("promote", "nobody", "1"), "no version of policy 'nobody'; policies that have one: policy"),
        (("promote", "policy", "1"), "is live already"),
        (("promote", "policy", "2"), "was rejected: the engine serves other weights; to have it probed"),
        (("rollback", "writer"), "no version of policy 'writer'"),
    ],
)
def test_mistakes_are_one_line(database: Database, arguments: tuple[str, ...], line: str) -> None:
    assert line in error(*arguments)
    with database.read() as conn:
        assert waiting_request(conn, "policy") is None


def test_an_empty_log_has_no_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DB", f"sqlite:///{tmp_path}/empty.db")
    Database.open(f"sqlite:///{tmp_path}/empty.db").close()
    assert document("list") == {"policies": []}
    assert "no policy yet" in run("list").stderr


# --- asking ---


def test_asking_without_waiting(database: Database) -> None:
    asked = document("rollback", "policy", "--no-wait", "--note", "worse")
    assert (asked["version"], asked["from_version"], asked["outcome"]) == (0, 1, None)
    with database.read() as conn:
        waits = waiting_request(conn, "policy")
    assert waits is not None
    assert (waits.id, waits.note, waits.verb) == (asked["id"], "worse", "rollback")
    assert "instead of 1" in run("promote", "policy", "2", "--even-if-rejected", "--no-wait").stdout
    assert [one["outcome"] for one in document("show", "policy")["requests"]] == ["superseded", None]


def test_nobody_takes_it_up(database: Database) -> None:
    line = error("rollback", "policy", "--timeout-sec", "0.05")
    assert "nobody has taken up version 0 of policy 'policy' within 0.05 s" in line
    assert "lightning policy promote policy 1" in line


@pytest.mark.parametrize("outcome", ["live", "rejected"])
def test_waiting_for_the_publisher(database: Database, outcome: str) -> None:
    def is_asked() -> bool:
        with database.read() as conn:
            return waiting_request(conn, "policy") is not None

    def publish() -> None:
        wait_until(is_asked)
        with database.write() as conn:
            verdict = {"result": "follows" if outcome == "live" else "other", "reason": "so it is"}
            status = VersionStatus(outcome)
            set_version_status(conn, "policy", 2, status, verdict=verdict, source="publisher")

    thread = threading.Thread(target=publish)
    thread.start()
    result = run("promote", "policy", "2", "--even-if-rejected")
    thread.join()
    if outcome == "live":
        assert result.exit_code == 0
        assert "version 2 of policy 'policy' is live, instead of 1: follows" in result.stdout
    else:
        assert str(result.exception) == (
            "version 2 of policy 'policy' is rejected, 1 keeps serving: so it is"
        )
