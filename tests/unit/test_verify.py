"""`lightning db verify` as a person types it, and what only a SQLite file can suffer."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.full_log import fill
from typer.testing import CliRunner

from lightning_rl.errors import StoreError
from lightning_rl.records import new_id
from lightning_rl.store.commands import db_app
from lightning_rl.store.database import Database
from lightning_rl.store.verify import verify

app = typer.Typer()
app.add_typer(db_app, name="db")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("LIGHTNING_DB", url)
    opened = Database.open(url)
    fill(opened)
    yield opened
    opened.close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["db", "verify", *arguments])


def test_the_exit_code_says_whether_the_log_is_whole(database: Database) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert "18 calls" in result.output
    assert "1 calls without an end" in result.output
    assert "no fault found" in result.output
    document = json.loads(run("--json").stdout)
    assert (document["num_faults"], document["rows"]["calls"]) == (0, 18)
    with database.write() as conn:
        conn.exec_driver_sql("UPDATE calls SET num_prompt_tokens = 1 WHERE id LIKE 'a%'")
    result = run()
    assert result.exit_code == 1
    assert "6 faults" in result.output
    result = run("--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["num_faults"]) == (1, 6)
    assert {fault["key"] for fault in document["faults"]} == {
        f"a{n}.{turn}" for n in (0, 1) for turn in range(3)
    }


def test_no_log_is_not_a_whole_log(tmp_path: Path) -> None:
    assert isinstance(run("--db", f"sqlite:///{tmp_path}/none.db").exception, StoreError)


def test_rows_that_another_program_deleted_are_missed(database: Database, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "log.db")
    other.execute("DELETE FROM calls WHERE id = 'a0.1'")
    other.execute("DELETE FROM choices WHERE call_id = 'a1.2'")
    other.execute("DELETE FROM body_parts")
    other.execute("DELETE FROM token_blocks WHERE parent IS NULL")
    other.commit()
    other.close()
    faults = verify(database).faults
    assert ("choices", "a0.1/0") in {(fault.table, fault.key) for fault in faults}
    assert any(fault.table == "choices" and "its call is missing" in fault.what for fault in faults)
    assert any(fault.table == "calls" and "of its request body is missing" in fault.what for fault in faults)
    assert any(fault.table == "token_blocks" and "parent" in fault.what for fault in faults)
    assert ("manifest_choices", "run/0/a1.2/0") in {(fault.table, fault.key) for fault in faults}


def test_a_page_that_was_overwritten_is_found(database: Database, tmp_path: Path) -> None:
    database.close()
    file = tmp_path / "log.db"
    content = bytearray(file.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    result = run()
    refused = isinstance(result.exception, StoreError) and "damaged" in str(result.exception)
    assert refused or (result.exit_code == 1 and "faults" in result.output)


def test_what_is_written_later_has_the_greater_id() -> None:
    made = [new_id() for _ in range(5000)]
    assert made == sorted(made)
    assert {len(name) for name in made} == {32}
