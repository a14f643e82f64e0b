"""The migrations make exactly the schema, by themselves, whole or not at all."""

import multiprocessing
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.log_rows import end, intent
from fakes.old_logs import REVISIONS, check_upgrade
from fakes.store_behaviours import rows_by_table, write

from lightning_rl import migrations
from lightning_rl.errors import SchemaError
from lightning_rl.store import upgrade
from lightning_rl.store.database import Database
from lightning_rl.store.schema import metadata


def open_and_close(url: str) -> None:
    Database.open(url).close()


def set_revision(database: Database, revision: str) -> None:
    with database.write() as conn:
        conn.execute(sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def test_the_newest_revision_is_the_one_that_the_program_wants() -> None:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(upgrade.alembic_config())
    assert scripts.get_heads() == [upgrade.HEAD]


def test_every_revision_is_a_file_of_the_package() -> None:
    assert migrations.__file__ is not None
    folder = Path(migrations.__file__).parent
    assert (folder / "env.py").is_file()
    assert [file.name[:4] for file in sorted((folder / "versions").glob("0*.py"))] == [
        "0001",
        "0002",
        "0003",
        "0004",
        "0005",
        "0006",
        "0007",
    ]


def test_migrated_tables_are_the_schema(tmp_path: Path) -> None:
    from alembic import command

    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    with database.engine.connect() as conn:
        command.check(upgrade.alembic_config(conn))
        made = sa.MetaData()
        made.reflect(conn)
    assert set(made.tables) == {*metadata.tables, "alembic_version"}
    for name, table in metadata.tables.items():
        assert {index.name for index in made.tables[name].indexes} == {index.name for index in table.indexes}
        assert {c.name: c.nullable for c in made.tables[name].c} == {c.name: c.nullable for c in table.c}
    database.close()


def test_opening_again_keeps_the_rows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    database = Database.open(url)
    write(database, intent("c1", task="t"), end("c1"))
    before = rows_by_table(database)
    database.close()
    database = Database.open(url)
    assert rows_by_table(database) == before
    with database.read() as conn:
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    database.close()


def test_every_earlier_revision_is_upgraded_from() -> None:
    from alembic.script import ScriptDirectory

    known = {
        script.revision for script in ScriptDirectory.from_config(upgrade.alembic_config()).walk_revisions()
    }
    assert known == {*REVISIONS, upgrade.HEAD}


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_log_of_an_earlier_revision_keeps_its_rows(tmp_path: Path, revision: str) -> None:
    check_upgrade(f"sqlite:///{tmp_path}/old.db", f"sqlite:///{tmp_path}/new.db", revision)


def test_downgrade_and_upgrade_leave_a_current_log(tmp_path: Path) -> None:
    from alembic import command

    url = f"sqlite:///{tmp_path}/log.db"
    database = Database.open(url)
    with database.write() as conn:
        command.downgrade(upgrade.alembic_config(conn), "base")
        assert set(sa.inspect(conn).get_table_names()) == {"alembic_version"}
    database.close()
    open_and_close(url)


def test_a_newer_schema_and_a_missing_one_are_refused_with_the_next_step(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    with pytest.raises(SchemaError, match="holds no log yet; run `lightning db upgrade"):
        Database.open(url, migrate=False)
    database = Database.open(url)
    set_revision(database, "9999")
    database.close()
    for migrate in (True, False):
        with pytest.raises(SchemaError, match=r"newer lightning-rl \(schema 9999.*pip install -U"):
            Database.open(url, migrate=migrate)


def test_somebody_else_s_tables_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.begin() as conn:
        conn.execute(sa.text("CREATE TABLE runs (mine TEXT)"))
    engine.dispose()
    with pytest.raises(SchemaError, match="'runs' that is not ours"):
        Database.open(f"sqlite:///{file}")


def test_an_interrupted_upgrade_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic import op

    url = f"sqlite:///{tmp_path}/log.db"
    create_index, seen = op.create_index, []

    def interrupted(*arguments: object, **named: object) -> None:
        seen.append(arguments)
        if len(seen) == 5:
            raise KeyboardInterrupt
        create_index(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "create_index", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Database.open(url)
    engine = sa.create_engine(url)
    with engine.connect() as conn:
        assert sa.inspect(conn).get_table_names() == []
    engine.dispose()
    monkeypatch.undo()
    open_and_close(url)


@pytest.mark.slow
def test_processes_that_open_a_new_log_at_once_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    url = f"sqlite:///{tmp_path}/log.db"
    processes = [context.Process(target=open_and_close, args=(url,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_log_with_rows_goes_back_before_providers_and_forth_again(tmp_path: Path) -> None:
    from alembic import command

    url = f"sqlite:///{tmp_path}/log.db"
    database = Database.open(url)
    write(database, intent("c1", task="t"), end("c1"))
    before = rows_by_table(database)
    with database.write() as conn:
        command.downgrade(upgrade.alembic_config(conn), "0003")
        assert "usage_estimated" not in {column["name"] for column in sa.inspect(conn).get_columns("calls")}
    database.close()
    database = Database.open(url)
    after = rows_by_table(database)
    assert after == before
    database.close()
