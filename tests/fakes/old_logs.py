"""Logs as earlier revisions left them, with rows of every table that they had."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from fakes.full_log import fill
from fakes.store_behaviours import rows_by_table

from lightning_rl.store import upgrade
from lightning_rl.store.database import Database
from lightning_rl.store.schema import metadata
from lightning_rl.store.verify import verify

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
"""Every one before the newest; a test holds them to the files."""


def check_upgrade(url: str, other_url: str, revision: str) -> None:
    """A log made at `revision` and filled there (with the rows of the log at `other_url`, as far as it had
    their columns) is upgraded: no row is lost or changed, and the schema is the newest."""
    source = Database.open(other_url)
    fill(source)
    before = rows_by_table(source)
    wanted = dict(before)
    engine = sa.create_engine(source.engine.url.set(database=sa.make_url(url).database))
    with engine.begin() as conn:
        command.upgrade(upgrade.alembic_config(conn), revision)
        old = sa.MetaData()
        old.reflect(conn)
        for table in metadata.sorted_tables:
            if table.name not in old.tables:
                assert not before[table.name]
                continue
            names = [column.name for column in table.c if column.name in old.tables[table.name].c]
            rows = [dict(zip(table.c.keys(), row, strict=True)) for row in before[table.name]]
            new = {column.name: None for column in table.c if column.name not in names}
            wanted[table.name] = sorted((tuple((row | new).values()) for row in rows), key=repr)
            if rows:
                conn.execute(table.insert(), [{name: row[name] for name in names} for row in rows])
    engine.dispose()
    database = Database.open(url)
    assert rows_by_table(database) == wanted
    assert verify(database).faults == []
    with database.engine.connect() as conn:
        assert upgrade.revision(conn) == upgrade.HEAD
        command.check(upgrade.alembic_config(conn))
    database.close()
    source.close()
