"""`lightning doctor` on logs whose faults are known beforehand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import write
from typer.testing import CliRunner

from lightning_rl.records import CallKind, CallStatus, EpisodeStatus, Quarantine
from lightning_rl.store import append, exclusions
from lightning_rl.store.commands import doctor
from lightning_rl.store.database import Database
from lightning_rl.store.doctor import check_up
from lightning_rl.store.drift import Cause

NO_ANSWER: dict[str, Any] = {"choices": ()}

app = typer.Typer()
app.command()(doctor)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    yield opened
    opened.close()


def body(*texts: str) -> bytes:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"model": "gpt-4o", "messages": messages}).encode()


def said(text: str, ids: list[int]) -> Any:
    return choice(ids, [-0.5] * len(ids), message={"role": "assistant", "content": text})


def test_an_empty_log_is_no_error(database: Database) -> None:
    found = run("--json")
    assert found["calls"]["share_trainable"] is None
    assert found["exclusions"] == []
    assert "0 calls: none in an episode" in run()


def test_a_sample_has_bounds(database: Database) -> None:
    result = CliRunner().invoke(app, ["--sample", "99999999999999999999"])
    assert result.exit_code == 2, result.output


def test_shares_and_reasons_add_up(database: Database) -> None:
    greedy = choice(quarantine=Quarantine.TEMPERATURE_ZERO)
    lost = choice(quarantine=Quarantine.COUNT_MISMATCH)
    write(
        database,
        intent("a1", "a", task="t"),
        end("a1", [1], choice(), choice(index=1)),
        intent("a2", "a", kind=CallKind.SIDE),
        end("a2"),
        intent("a3", "a"),
        end("a3", [1], greedy),
        intent("a4", "a", kind=CallKind.SIDE),
        end("a4", [1], greedy),
        intent("b1", "b", conflict="body says 'x'"),
        end("b1", [1], lost),
        intent("b2", "b"),
        intent("b3", "b"),
        end("b3", None, status=CallStatus.ERROR, **NO_ANSWER),
        intent("u1", None),
        end("u1"),
        intent("u2", None, kind=CallKind.JUDGE),
        end("u2"),
    )
    with database.write() as conn:
        append.end_episode(conn, "a", by="api")
    write(database, intent("a5", "a"), end("a5"))
    found = run("--json")
    calls = found["calls"]
    assert (calls["calls"], calls["attributed"], calls["complete"]) == (10, 8, 8)
    # a1 gives two; a2, a3, a4, a5, b1, u1 and u2 one each. b1 is inexact; only a1's and a5's can be trained.
    assert (calls["answers"], calls["exact"], calls["trainable"]) == (9, 8, 3)
    assert calls["share_temperature_zero"] == 2 / 9
    reasons = {row["reason"]: (row["count"], row["example"]) for row in found["exclusions"]}
    assert reasons == {
        "side_call": (2, "a4"),
        "temperature_zero": (2, "a4"),
        "unattributed": (2, "u2"),
        "judge_call": (1, "u2"),
        "count_mismatch": (1, "b1"),
        "open": (1, "b2"),
        "error": (1, "b3"),
        "attribution_conflict": (1, "b1"),
        "running": (1, "b"),
        "unrewarded": (1, "a"),
        "late_call": (1, "a"),
    }
    assert all(row["advice"] for row in found["exclusions"])
    shown = run()
    assert "10 calls: 80.0% in an episode, 80.0% answered to the end" in shown
    assert "9 answers: 88.9% exact, 33.3% trainable, 22.2% at temperature 0" in shown


def test_every_reason_of_the_log_has_an_advice() -> None:
    for kinds, table in (
        (Quarantine, exclusions._QUARANTINE_ADVICE),
        (CallStatus, exclusions._STATUS_ADVICE),
        (CallKind, exclusions._KIND_ADVICE),
    ):
        assert set(kinds) - set(table) <= {CallStatus.COMPLETE, CallKind.POLICY}


def test_more_unattributed_calls_than_are_looked_at_give_an_estimate(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        quarantine = Quarantine.PENALTIES if number % 2 else None
        write(database, intent(f"u{number}", None), end(f"u{number}", [1], choice(quarantine=quarantine)))
    write(database, intent("a1"), end("a1"))
    for looked_at, is_estimate in ((8, False), (4, True)):
        monkeypatch.setattr(exclusions, "MAX_EXAMINED", looked_at)
        calls = run("--json")["calls"]
        assert (calls["trainable"], calls["is_estimate"]) == (1, is_estimate)
    assert "about 11.1% trainable" in run()


def test_groups_without_variance_are_named_with_what_they_were_worth(database: Database) -> None:
    worth: dict[str, tuple[int | None, ...]] = {"solved": (1, 1), "failed": (0, 0), "mixed": (0, 1)}
    worth |= {"lone": (1,), "silent": (None, None), "half": (1, None)}
    for task, values in worth.items():
        for number, value in enumerate(values):
            name = f"{task}-{number}"
            write(database, intent(f"c-{name}", name, task=task), end(f"c-{name}"))
            with database.write() as conn:
                if value is not None:
                    append.add_reward(conn, reward(name, value))
                append.end_episode(conn, name, by="api")
    with database.write() as conn:
        append.end_episode(conn, "mixed-0", status=EpisodeStatus.EXCLUDED, by="cli")
    groups = run("--json")["groups"]
    assert (groups["examined"], groups["in_log"]) == (6, 6)
    assert (groups["with_variance"], groups["no_variance"], groups["lone"], groups["unrewarded"]) == (
        0,
        2,
        3,
        1,
    )
    assert sorted(groups["no_variance_values"]) == [[0.0, 1], [1.0, 1]]
    assert groups["no_variance_example"] in ("solved", "failed")
    assert "2 without (1 all" in run()


def test_drift_is_found_counted_and_explained(database: Database) -> None:
    write(
        database,
        intent("a1", "a", body=body("q")),
        end("a1", [1, 2, 3], said("yes", [7, 8])),
        intent("a2", "a", body=body("q", "yes", "more"), parent_call_id="a1"),
        end("a2", [1, 2, 3, 7, 8, 4], said("no", [9])),
        intent("a3", "a", body=body("q", "yes", "more", "never", "so"), parent_call_id="a2"),
        end("a3", [1, 2, 3, 7, 8, 4, 5, 5, 5], said("x", [9])),
        intent("a4", "a", body=body("something else")),
        end("a4", [40, 41], said("x", [9])),
        intent("one", "single"),
        end("one"),
    )
    write(database, intent("a4-again", "a", body=body("something else")), end("a4-again", [40, 41]))
    with database.read() as conn:
        drift = check_up(conn).drift
    assert drift is not None
    assert (drift.episodes, drift.episodes_in_log, drift.calls) == (1, 1, 5)
    assert (drift.pairs, drift.extending, drift.prompt_tokens, drift.recomputed_tokens) == (3, 1, 17, 5)
    found = {count.cause: count.example for count in drift.causes}
    assert set(found) == {Cause.ANSWER_EDITED, Cause.OTHER_AGENT}
    edited = found[Cause.ANSWER_EDITED]
    assert (edited.episode_id, edited.previous_call_id, edited.call_id, edited.at_token) == (
        "a",
        "a2",
        "a3",
        6,
    )
    shown = run()
    assert (
        "1 of 3 prompts go on where the call before ended; 5 prompt tokens (29.4%) are computed twice"
        in shown
    )
    assert "drift: answer_edited" in shown
    assert run("--json", "--sample", "0")["drift"] is None


def test_a_sample_of_large_prompts_is_smaller_and_says_so(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_rl.store import drift_sample

    for number in range(4):
        name = f"e{number}"
        write(database, intent(f"{name}-1", name, started_at_ms=number), end(f"{name}-1", [1] * 10))
        write(database, intent(f"{name}-2", name, started_at_ms=number), end(f"{name}-2", [1] * 10 + [7, 8]))
    monkeypatch.setattr(drift_sample, "MAX_TOKENS", 50)
    drift = run("--json")["drift"]
    assert (drift["episodes"], drift["episodes_in_log"], drift["extending"]) == (2, 4, 2)
    monkeypatch.setattr(drift_sample, "MAX_TOKENS", 1)
    assert run("--json")["drift"]["episodes"] == 1, "one at least"
