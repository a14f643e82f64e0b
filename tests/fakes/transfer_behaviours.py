"""Export and import, on every database: exact there and back, twice is once, damage changes nothing."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.full_log import IMAGE, fill, play
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import behaviour, rows_by_table, write

from lightning_rl.errors import UnknownEpisodeError, UserError
from lightning_rl.records import Transition
from lightning_rl.store import append, policies, read
from lightning_rl.store.curation import assign_calls
from lightning_rl.store.database import Database
from lightning_rl.store.prune import only_one
from lightning_rl.store.transfer import Part, export_log, import_log
from lightning_rl.store.verify import verify
from lightning_rl.trainer.credit.registry import configure
from lightning_rl.trainer.planning.plan import PlanSettings, StepPlan, plan_step, transitions
from lightning_rl.trainer.planning.selection import SelectionRules

ALL = Part()
FORMS = ("jsonl", "jsonl.gz", "parquet")


@contextmanager
def another(folder: Path, name: str) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{folder}/{name}.db")
    try:
        yield database
    finally:
        database.close()


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def exported(database: Database, target: Path, part: Part = ALL) -> Path:
    export_log(database, target, part, as_parquet=target.suffix == ".parquet")
    return target


def rows(database: Database) -> dict[str, list[tuple[object, ...]]]:
    return {name: its for name, its in rows_by_table(database).items() if name != "alembic_version"}


def planned(database: Database, name: str = "task-b") -> tuple[StepPlan, list[Transition]]:
    settings = PlanSettings(SelectionRules("policy", "skip", None), configure("dr_grpo"))
    with database.read() as conn:
        groups = read.load_groups(conn, [read.group_id(name, "b")])
    step = plan_step(groups, settings, run_id="run", step=0, from_version=1)
    assert step.trains
    return step, transitions(step.manifest, groups)


@behaviour
def test_there_and_back_through_either_database_nothing_changes(database: Database) -> None:
    with folder() as at, another(at, "origin") as origin, another(at, "copy") as copy:
        fill(origin)
        before = rows(origin)
        export_log(origin, at / "log.jsonl", ALL, as_parquet=False)
        import_log(database, at / "log.jsonl")
        assert rows(database) == before
        assert planned(database) == planned(origin)
        export_log(database, at / "log.parquet", ALL, as_parquet=True)
        read_rows, added = import_log(copy, at / "log.parquet")
        assert rows(copy) == before
        assert read_rows == added == {name: len(its) for name, its in before.items() if its}
        assert planned(copy) == planned(origin)
        assert verify(copy).faults == verify(database).faults == []


@behaviour
def test_importing_twice_changes_nothing(database: Database) -> None:
    fill(database)
    before = rows(database)
    with folder() as at:
        for form in FORMS:
            file = exported(database, at / f"log.{form}")
            for _ in range(2):
                _, added = import_log(database, file)
                assert sum(added.values()) == 0
                assert rows(database) == before
            with pytest.raises(UserError, match="exists already"):
                exported(database, file)


@behaviour
def test_a_log_that_has_gone_on_is_brought_up(database: Database) -> None:
    with folder() as at, another(at, "origin") as origin:
        fill(origin)
        import_log(database, exported(origin, at / "first.jsonl"))
        write(origin, end("odd.3", [1, 2], choice([3], [-0.5])), intent("odd.4", "odd"))
        play(origin, "a2", "task-a", 0.5)
        with origin.write() as conn:
            append.add_reward(conn, reward("a0", 0.75, "late"))
            assign_calls(conn, "odd", ["bin.0"], by="person")
            policies.set_version_status(conn, "policy", 0, policies.VersionStatus.RETIRED, source="publisher")
        import_log(database, exported(origin, at / "second.jsonl"))
        assert rows(database) == rows(origin)
        assert verify(database).faults == []


@behaviour
def test_a_part_holds_what_it_needs_and_no_more(database: Database) -> None:
    fill(database)
    play(database, "w", "task-w", 1.0, policy="writer")
    with folder() as at:
        parts = {
            "episode": Part(episode_ids=("a0",)),
            "policy": Part(policy="policy"),
            "since": Part(since_ms=2**52),
        }
        for name, part in parts.items():
            for form in ("jsonl", "parquet"):
                file = exported(database, at / f"{name}.{form}", part)
                with another(at, f"{name}-{form}") as copy:
                    import_log(copy, file)
                    assert verify(copy).faults == []
                    found = {table: len(its) for table, its in rows(copy).items() if its}
                    names = [row[0] for row in rows(copy)["episodes"]]
                if name == "episode":
                    assert names == ["a0"]
                    assert (found["calls"], found["rewards"], found["groups"]) == (3, 5, 1)
                    assert "runs" not in found
                elif name == "policy":
                    assert names == ["a0", "a1", "b0", "b1", "odd"]
                    assert (found["policy_versions"], found["runs"], found["calls"]) == (2, 1, 12 + 4 + 1)
                else:
                    assert not names
                    assert "calls" not in found
        with pytest.raises(UnknownEpisodeError, match="nothing was exported"):
            exported(database, at / "none.jsonl", Part(episode_ids=("nobody",)))
        assert not (at / "none.jsonl").exists()
        assert not list(at.glob("*.partial"))


@behaviour
def test_what_disagrees_with_the_log_is_refused_as_a_whole(database: Database) -> None:
    with folder() as at, another(at, "origin") as origin:
        play(origin, "new", "task-a", 1.0)
        play(origin, "same", "task-a", 1.0)
        play(database, "same", "task-a", 0.0)
        before = rows(database)
        with pytest.raises(UserError, match="'same' already, with another history"):
            import_log(database, exported(origin, at / "log.jsonl"))
        assert rows(database) == before


@behaviour
def test_an_episode_that_has_gone_on_in_both_logs_is_refused(database: Database) -> None:
    with folder() as at, another(at, "origin") as origin:
        write(origin, intent("c1", "e", task="t"), end("c1"))
        import_log(database, exported(origin, at / "first.jsonl"))
        write(origin, intent("c2-there", "e"), end("c2-there"))
        write(database, intent("c2-here", "e"), end("c2-here"))
        before = rows(database)
        with pytest.raises(UserError, match="call 1 of episode 'e' already, with another history"):
            import_log(database, exported(origin, at / "second.jsonl"))
        assert rows(database) == before


@behaviour
def test_no_prune_collects_what_an_import_is_about_to_refer_to(database: Database) -> None:
    seen: list[int] = []

    def prune_meanwhile(num_rows: int) -> None:
        with pytest.raises(UserError, match="another prune or import is running"), only_one(database):
            pass
        seen.append(num_rows)

    with folder() as at, another(at, "origin") as origin:
        fill(origin)
        file = exported(origin, at / "log.jsonl")
        import_log(database, file, prune_meanwhile)
        assert seen
        with only_one(database), pytest.raises(UserError, match="another prune or import is running"):
            import_log(database, file)


@behaviour
def test_numbers_that_json_or_64_bits_do_not_hold_come_back(database: Database) -> None:
    odd = {"content": 2**70, "n": [float("nan"), float("-inf")]}
    large = {"content": "1", "arguments": {"id": 10**30, "x": 0.1234567890123456789}}
    with folder() as at, another(at, "origin") as origin:
        write(origin, intent("c1", sampling={"seed": 2**70 + 1}), end("c1", [1], choice(message=odd)))
        write(origin, intent("c2"), end("c2", [1], choice(message=large)))
        for form in FORMS:
            with another(at, f"copy-{form}") as copy:
                import_log(copy, exported(origin, at / f"log.{form}"))
                assert rows(copy) == rows(origin)
                assert verify(copy).faults == []
        import_log(database, at / "log.jsonl")
        with database.read() as conn:
            (episode,) = read.load_episodes(conn, ["ep"])
        assert episode.calls[0].sampling == {"seed": 2**70 + 1}


@behaviour
def test_damaged_input_is_one_line_and_changes_nothing(database: Database) -> None:
    rng = random.Random(7)
    with folder() as at, another(at, "origin") as origin:
        fill(origin)
        play(database, "own", "task-o", 1.0)
        before = rows(database)
        lines = exported(origin, at / "log.jsonl").read_bytes().splitlines(keepends=True)
        packed = exported(origin, at / "log.jsonl.gz").read_bytes()
        whole = b"".join(lines)
        damaged = {
            "empty": b"",
            "text": b"hello\n",
            "json": b"[1]\n",
            "newer": lines[0].replace(b'"version":1', b'"version":9') + b"".join(lines[1:]),
            "no end": b"".join(lines[:-1]),
            "cut": whole[: len(whole) // 2],
            "line gone": b"".join(lines[:5] + lines[6:]),
            "line twice": b"".join(lines[:5] + lines[4:]),
            "column": whole.replace(b'"num_calls"', b'"num_tools"', 1),
            "table": whole.replace(b'"table":"rewards"', b'"table":"prizes"', 1),
            "a list for an id": re.sub(
                rb'"table":"calls","row":{"id":"[^"]*"', b'"table":"calls","row":{"id":[1]', whole
            ),
            "a text for a count": whole.replace(b'"num_tokens":20', b'"num_tokens":"20"', 1),
            "number": whole.replace(b'"num_tokens":20', b'"num_tokens":21', 1),
        }
        for place in rng.sample(range(len(whole)), 40):
            damaged[f"byte {place}"] = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        for name, content in damaged.items():
            file = at / "damaged.jsonl"
            file.write_bytes(content)
            _refuses(database, file, name)
        for place in rng.sample(range(30, len(packed)), 20):
            file = at / "damaged.jsonl.gz"
            file.write_bytes(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
            _refuses(database, file, f"packed byte {place}")
        _refuses(database, at / "nowhere.jsonl", "missing")
        assert rows(database) == before


@behaviour
def test_damaged_parquet_is_one_line_and_changes_nothing(database: Database) -> None:
    pytest.importorskip("pyarrow")
    rng = random.Random(8)
    with folder() as at, another(at, "origin") as origin:
        fill(origin)
        whole = exported(origin, at / "log.parquet")
        before = rows(database)
        _refuses(database, at, "no log.json")
        header = json.loads((whole / "log.json").read_text())
        for name in ("calls", "body_parts", "token_blocks", "choices"):
            file = whole / f"{name}.parquet"
            content = file.read_bytes()
            for place in rng.sample(range(len(content)), 12):
                file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
                try:
                    import_log(database, whole)
                except UserError as error:
                    assert "\n" not in str(error)  # noqa: PT017 - a byte of the footer may say nothing
                    assert rows(database) == before
                else:
                    assert rows(database) == rows(origin)
                    return
            file.write_bytes(content)
        (whole / "log.json").write_text(json.dumps({name: header[name] for name in ("format", "version")}))
        _refuses(database, whole, "no counts")
        (whole / "log.json").write_text(json.dumps(header))
        (whole / "rewards.parquet").unlink()
        _refuses(database, whole, "a table gone")
        header["rows"]["calls"] += 1
        (whole / "log.json").write_text(json.dumps(header))
        _refuses(database, whole, "another count")
        assert rows(database) == before


def _refuses(database: Database, file: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        import_log(database, file)
    assert "\n" not in str(caught.value), name
    assert str(file.name) in str(caught.value) or "damaged" in str(caught.value), (name, str(caught.value))


@behaviour
def test_an_export_can_be_read_without_us(database: Database) -> None:
    fill(database)
    with folder() as at:
        lines = [json.loads(line) for line in exported(database, at / "log.jsonl").read_text().splitlines()]
    rows_of = {
        table: [line["row"] for line in lines if line.get("table") == table]
        for table in ("choices", "body_parts", "calls")
    }
    answer = next(row for row in rows_of["choices"] if row["call_id"] == "a0.1")
    assert len(answer["completion_ids"]) == len(answer["behavior_logprobs"]) == 20
    assert answer["message"] == {"json": {"role": "assistant", "content": "2"}}
    odd = next(row for row in rows_of["choices"] if row["call_id"] == "odd.1")
    assert set(odd["behavior_logprobs"]) == {"base64"}  # JSON knows no NaN
    assert sum(IMAGE in row["bytes"]["text"] for row in rows_of["body_parts"]) >= 1
