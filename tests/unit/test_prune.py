"""`lightning db prune` as a person types it, and what stays in a SQLite file after it."""

import json
import random
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.full_log import fill, play, prompt
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import rows_by_table, write
from typer.testing import CliRunner

from lightning_rl.errors import UnknownEpisodeError, UserError
from lightning_rl.records import RewardTarget, now_ms
from lightning_rl.store import space
from lightning_rl.store.append import add_reward
from lightning_rl.store.blocks import BLOCK_TOKENS, pack_ids
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
    yield opened
    opened.close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["db", "prune", *arguments])


def test_nothing_goes_without_yes(database: Database) -> None:
    fill(database)
    before = rows_by_table(database)
    result = run("--episode", "b0")
    assert result.exit_code == 0, result.output
    assert "would delete 3 calls, 3 choices, 1 reward, 1 episode" in result.output
    assert "add --yes" in result.output
    assert rows_by_table(database) == before
    result = run("--episode", "b0", "--yes", "--json")
    document = json.loads(result.stdout)
    assert (document["deleted"], document["rows"]["episodes"], document["rows"]["body_parts"]) == (True, 1, 4)
    assert document["space"]["rewritten"] is True
    assert verify(database).faults == []


def test_age_is_days_or_a_date(database: Database) -> None:
    play(database, "old", "t", 1.0)
    play(database, "new", "t", 1.0)
    with database.write() as conn:
        month_ago = now_ms() - 30 * 86_400_000
        conn.exec_driver_sql(
            "UPDATE episodes SET created_at_ms = ?, last_call_at_ms = ?, ended_at_ms = ? WHERE id = 'old'",
            (month_ago, month_ago, month_ago),
        )
    assert "would delete nothing" in run("--older-than", "31").output
    assert "1 episode" in run("--older-than", "29").output
    assert "1 episode" in run("--older-than", "2w").output
    assert "2 episodes" in run("--older-than", "2200-01-01").output
    assert run("--older-than", "29", "--yes").exit_code == 0
    assert "1 episode" in run("--older-than", "2200-01-01").output


def test_a_policy_that_no_episode_began_with_is_told(database: Database, tmp_path: Path) -> None:
    play(database, "a", "t", 1.0)
    words = "no episode of the log began with policy 'nope'"
    result = run("--policy", "nope", "--yes")
    assert (result.exit_code, words in result.stderr) == (0, True)
    result = CliRunner().invoke(app, ["db", "export", str(tmp_path / "x"), "--policy", "nope"])
    assert (result.exit_code, words in result.stderr) == (0, True)
    assert words not in run("--policy", "policy").output


def test_running_episodes_have_no_age_and_are_counted(database: Database) -> None:
    write(database, intent("c", "going-on"), end("c", [1], choice([2], [-0.5])))
    with database.write() as conn:
        conn.exec_driver_sql("UPDATE episodes SET created_at_ms = 1, last_call_at_ms = 1")
    result = run("--older-than", "1s", "--yes")
    assert "deleted nothing" in result.output
    assert "left out: 1 episode: it has not ended" in result.output
    assert "1 episode" in run("--episode", "going-on").output, "named, it goes"


def test_mistakes_get_one_line_and_delete_nothing(database: Database) -> None:
    fill(database)
    before = rows_by_table(database)
    for arguments, kind, words in (
        (["--episode", "nobody", "--yes"], UnknownEpisodeError, "nothing was deleted"),
        (["--older-than", "soon", "--yes"], UserError, "is no time"),
        (["--before-version", "3", "--yes"], UserError, "needs --policy"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, kind)
        assert words in str(result.exception)
    assert rows_by_table(database) == before


def test_without_a_selection_only_what_nothing_refers_to_is_collected(database: Database) -> None:
    fill(database)
    with database.write() as conn:
        conn.exec_driver_sql("UPDATE calls SET request_body = NULL WHERE episode_id = 'b0'")
    episodes = rows_by_table(database)["episodes"]
    assert "would collect 4 body parts" in run().output
    assert json.loads(run("--yes", "--json").stdout)["rows"] == {"token_blocks": 0, "body_parts": 4}
    assert rows_by_table(database)["episodes"] == episodes
    assert verify(database).notes["orphaned_parts"] == 0


def secrets_of(name: str) -> dict[str, bytes]:
    """Bytes as they lie in the file; not those that are shared or compressed."""
    rng = random.Random(f"{name}.1")
    ids = [rng.randrange(150_000) for _ in range(20)]
    own = prompt(name, 2)
    second_block = own[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]
    return {
        "completion": pack_ids(_array(ids)),
        "logprobs": struct.pack("<20f", *[-rng.random() for _ in ids]),
        "prompt": pack_ids(_array(second_block)),
        "note": f"note of {name}".encode(),
        "name": name.encode(),
    }


def _array(ids: list[int]) -> Any:
    from lightning_rl.records import token_ids

    return token_ids(ids)


@pytest.mark.parametrize("flag", ["--vacuum", "--no-vacuum"])
def test_what_was_deleted_is_not_in_the_file_any_more(database: Database, tmp_path: Path, flag: str) -> None:
    for number in range(12):
        play(database, f"kept-episode-{number}", f"t{number % 3}", 1.0)
        play(database, f"secret-episode-{number}", f"t{number % 3}", 1.0)
    secret = secrets_of("secret-episode-5")
    kept = secrets_of("kept-episode-5")
    on_disk = _bytes_on_disk(tmp_path)
    assert [name for name, value in secret.items() if value not in on_disk] == []
    size = _num_pages(tmp_path)
    names = [part for number in range(12) for part in ("--episode", f"secret-episode-{number}")]
    result = run(*names, "--yes", flag)
    assert result.exit_code == 0, result.output
    on_disk = _bytes_on_disk(tmp_path)
    assert [name for name, value in secret.items() if value in on_disk] == []
    assert [name for name, value in kept.items() if value not in on_disk] == []
    assert _num_pages(tmp_path) < 0.95 * size
    assert not (tmp_path / "log.db-prune").exists()
    assert verify(database).faults == []


def _num_pages(folder: Path) -> int:
    raw = sqlite3.connect(folder / "log.db")
    (count,) = raw.execute("PRAGMA page_count").fetchone()
    raw.close()
    return int(count)


def _bytes_on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.iterdir()))


def test_a_log_made_without_incremental_vacuum_gets_it_with_its_first_rewrite(
    database: Database, tmp_path: Path
) -> None:
    database.close()
    raw = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    raw.execute("PRAGMA auto_vacuum = NONE")
    raw.execute("VACUUM")
    assert raw.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    raw.close()
    play(database, "a", "t", 1.0)
    assert run("--episode", "a", "--yes").exit_code == 0
    raw = sqlite3.connect(tmp_path / "log.db")
    assert raw.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    raw.close()


def test_a_file_in_use_is_cleaned_as_far_as_it_goes_and_says_so(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(database, "a", "t", 1.0)
    monkeypatch.setattr(space, "REWRITTEN_BYTES", 0)
    with database.read() as conn:  # a trainer that reads for long
        conn.exec_driver_sql("SELECT count(*) FROM calls")
        monkeypatch.setattr(space, "READERS_WAIT_MS", 50)
        result = run("--episode", "a", "--yes")
    assert result.exit_code == 0, result.output
    assert "a reader still needs the write-ahead log" in result.output


def test_a_call_s_reward_and_judgements_go_with_it(database: Database) -> None:
    write(database, intent("c", "e"), end("c", [1], choice([2], [-0.5])))
    with database.write() as conn:
        add_reward(conn, reward("e", 1.0, final=True))
        add_reward(conn, reward("e", 0.5, target=RewardTarget.CALL, call_id="c"))
    assert run("--episode", "e", "--yes").exit_code == 0
    tables = rows_by_table(database)
    assert {name for name, rows in tables.items() if rows} <= {"alembic_version"}
