"""The store on a real Postgres: the shared behaviours, and what only a server can do to us."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import fakes.retry_behaviours  # noqa: F401 - registers its own
import pytest
import sqlalchemy as sa
from fakes import (  # noqa: F401 - add to the list
    policy_behaviours,
    prune_behaviours,
    reward_behaviours,
    run_behaviours,
    transfer_behaviours,
    verify_behaviours,
)
from fakes.fleet_scenarios import SCENARIOS, Scenario
from fakes.fleet_scenarios import run as run_fleet
from fakes.log_rows import end, intent
from fakes.old_logs import REVISIONS, check_upgrade
from fakes.postgres_server import PostgresMissingError, PostgresServer
from fakes.store_behaviours import BEHAVIOURS, rows_by_table, write

from lightning_rl.errors import SchemaError, StoreError
from lightning_rl.store import upgrade
from lightning_rl.store.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    try:
        running = PostgresServer()
    except PostgresMissingError as error:
        pytest.skip(str(error))
    with running:
        yield running


@pytest.mark.parametrize(
    "behaviour", BEHAVIOURS, ids=lambda function: function.__name__.removeprefix("test_")
)
def test_on_postgres(behaviour: Callable[[Database], None], server: PostgresServer) -> None:
    database = Database.open(server.new_database())
    try:
        behaviour(database)
    finally:
        database.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__.removeprefix("test_"))
def test_fleet_on_postgres(scenario: Scenario, server: PostgresServer, tmp_path: Path) -> None:
    run_fleet(scenario, server.new_database(), tmp_path)


def test_migrated_tables_are_the_schema(server: PostgresServer) -> None:
    from alembic import command

    url = server.new_database()
    with pytest.raises(SchemaError, match="holds no log yet"):
        Database.open(url, migrate=False)
    database = Database.open(url)
    with database.engine.connect() as conn:
        command.check(upgrade.alembic_config(conn))
        conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        conn.commit()
    database.close()
    for migrate in (True, False):
        with pytest.raises(SchemaError, match="written by a newer lightning-rl"):
            Database.open(url, migrate=migrate)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_log_of_an_earlier_revision_keeps_its_rows(server: PostgresServer, revision: str) -> None:
    check_upgrade(server.new_database(), server.new_database(), revision)


def test_processes_that_open_a_new_log_at_once_all_succeed(server: PostgresServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    url = server.new_database()
    with ThreadPoolExecutor(6) as pool:
        for database in list(pool.map(lambda _: Database.open(url), range(6))):
            database.close()


def test_a_reader_sees_one_snapshot_and_cannot_write(server: PostgresServer) -> None:
    database = Database.open(server.new_database())
    with database.read() as conn:
        count = sa.text("SELECT count(*) FROM calls")
        assert conn.execute(count).scalar() == 0
        write(database, intent("c1"))
        assert conn.execute(count).scalar() == 0
    with pytest.raises(StoreError, match="read-only"), database.read() as conn:
        conn.execute(sa.text("DELETE FROM calls"))
    database.close()


def test_each_mistake_in_the_url_gets_one_line(server: PostgresServer) -> None:
    host = f"127.0.0.1:{server.port}"
    for url, words in (
        (f"postgresql://lightning:secret@{host}/nowhere", "does not exist.*createdb"),
        (f"postgresql://stranger:secret@{host}/postgres", "does not exist"),
        ("postgresql://lightning:secret@127.0.0.1:1/log", "refused.*start Postgres"),
        ("postgres://lightning:secret@no-such-host.invalid/log", "no such host"),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            Database.open(url)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_crash_of_the_server_loses_no_commit_and_needs_no_restart_of_ours(server: PostgresServer) -> None:
    database = Database.open(server.new_database())
    batch = [intent("c1", task="t"), end("c1")]
    write(database, *batch)
    before = rows_by_table(database)
    server.stop(signal.SIGQUIT)
    with pytest.raises(StoreError, match="start Postgres"):
        write(database, intent("c2"))
    server.start()
    write(database, *batch)  # as the recorder does with a batch whose commit it can't be sure of
    assert rows_by_table(database) == before
    database.close()
