"""The schema's revision: which one a database has, which one this program wants, and the way between.

Alembic is imported only when something has to change, so that opening a current log stays quick.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import sqlalchemy as sa

from .. import migrations
from ..errors import SchemaError
from .schema import metadata

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0007"
"""The newest revision in migrations/versions; a test holds it to the files."""

_LOCK_KEY = 0x4C49_4748_544E  # "LIGHTN": names the Postgres advisory lock of a running upgrade


def revision(conn: sa.Connection) -> str | None:
    """The database's revision; None where it has no table of ours."""
    if not sa.inspect(conn).has_table("alembic_version"):
        return None
    found: str | None = conn.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    return found


def to_head(engine: sa.Engine, shown_url: str) -> None:
    """Bring the schema up to date in one transaction; several processes may try at once.

    Interrupted at any point, the database is as it was before.
    """
    with engine.connect() as conn:
        found = revision(conn)
    if found == HEAD:
        return
    with engine.connect() as conn:
        sqlite = conn.dialect.name == "sqlite"
        if sqlite:
            # Alembic's copy-drop-rename would fire ON DELETE CASCADE. The pragma is void in a transaction,
            # so it goes to the driver before SQLAlchemy begins one.
            _driver_execute(conn, "PRAGMA foreign_keys = OFF")
            conn.execution_options(sqlite_begin="BEGIN IMMEDIATE")
        try:
            with conn.begin():
                if not sqlite:
                    conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
                _upgrade(conn, shown_url)
        finally:
            if sqlite:
                _driver_execute(conn, "PRAGMA foreign_keys = ON")


def require_head(engine: sa.Engine, shown_url: str) -> None:
    """SchemaError with the next step unless the schema is current."""
    with engine.connect() as conn:
        found = revision(conn)
    if found is None:
        raise SchemaError(f"{shown_url} holds no log yet; run `lightning db upgrade --db URL`")
    if found != HEAD:
        _refuse_unknown(found, shown_url)
        raise SchemaError(
            f"{shown_url} has schema {found}, this program wants {HEAD}; run `lightning db upgrade`"
        )


def alembic_config(conn: sa.Connection | None = None) -> Config:
    """Alembic's configuration from package files; migrations/env.py takes connection and tables from it."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(resources.files(migrations)).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    config.attributes["metadata"] = metadata
    return config


def _upgrade(conn: sa.Connection, shown_url: str) -> None:
    from alembic import command

    found = revision(conn)  # again, under the lock: another process may have been quicker
    if found == HEAD:
        return
    if found is not None:
        _refuse_unknown(found, shown_url)
    elif taken := set(sa.inspect(conn).get_table_names()) & set(metadata.tables):
        raise SchemaError(
            f"{shown_url} has a table {min(taken)!r} that is not ours; give the log a database of its own"
        )
    command.upgrade(alembic_config(conn), "head")
    if conn.dialect.name == "sqlite":
        broken = conn.exec_driver_sql("PRAGMA foreign_key_check").first()
        assert broken is None, f"the upgrade broke a foreign key: {broken}"


def _refuse_unknown(found: str, shown_url: str) -> None:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if found not in known:
        raise SchemaError(
            f"{shown_url} was written by a newer lightning-rl (schema {found}, this program knows {HEAD}); "
            "pip install -U lightning-rl"
        )


def _driver_execute(conn: sa.Connection, statement: str) -> None:
    cursor = conn.connection.cursor()
    cursor.execute(statement)
    cursor.close()
