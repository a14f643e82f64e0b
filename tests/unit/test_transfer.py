"""`lightning db export` and `import` as a person types them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.full_log import fill
from fakes.store_behaviours import rows_by_table
from typer.testing import CliRunner

from lightning_rl.errors import StoreError, UserError
from lightning_rl.store.commands import db_app
from lightning_rl.store.database import Database

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
    return CliRunner().invoke(app, ["db", *arguments])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_log_goes_into_another(database: Database, tmp_path: Path, form: str) -> None:
    file = str(tmp_path / f"out.{form}")
    result = run("export", file, "--format", form)
    assert result.exit_code == 0, result.output
    assert "5 episodes, 18 calls, 17 choices, 8 rewards" in result.output
    url = f"sqlite:///{tmp_path}/copy.db"
    assert "added 5 episodes, 18 calls" in run("import", file, "--db", url).output
    document = json.loads(run("import", file, "--db", url, "--json").stdout)
    assert (document["rows_read"]["calls"], sum(document["rows_added"].values())) == (18, 0)
    copy = Database.open(url)
    assert rows_by_table(copy) == rows_by_table(database)
    copy.close()
    part = json.loads(run("export", f"{file}.part", "--format", form, "--episode", "a0", "--json").stdout)
    assert (part["rows"]["episodes"], part["rows"]["calls"]) == (1, 3)


def test_mistakes_get_one_line(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    for arguments, kind, words in (
        (["export", "-"], UserError, "name a file"),
        (["export", str(tmp_path / "x"), "--format", "csv"], UserError, "jsonl or parquet"),
        (["export", str(tmp_path / "log.db")], UserError, "exists already"),
        (["export", str(tmp_path / "no" / "x")], UserError, "there is no folder"),
        (["export", str(tmp_path / "x"), "--db", f"sqlite:///{tmp_path}/none.db"], StoreError, "no log at"),
        (["import", str(tmp_path / "none")], UserError, "there is no"),
        (["import", str(tmp_path / "deep")], UserError, "line 1: nested too deep"),
        (["import", str(tmp_path / "log.db")], UserError, "nothing was imported"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, kind), arguments
        assert words in str(result.exception)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("export", str(tmp_path / "x"), "--format", "parquet")
    assert "pip install 'lightning-rl[parquet]'" in str(result.exception)
