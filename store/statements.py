"""Pieces of SQL and cleaning that the other files of the store share; knows no table.

Many rows go in one statement, compiled once and handed to the driver as text. That saves more than the work
of SQLAlchemy: the driver of SQLite gives the lock of Python away at every step of a statement; with a step
per row the writer would wait for the event loop at each of them. Numbers of rows are powers of two, so that a
few texts serve all of them and the drivers find them in their caches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, TypeVar

import orjson
import sqlalchemy as sa

T = TypeVar("T")

MAX_VARIABLES = 1000
"""Values in one IN list: far below both databases' limits, and few enough forms for their plan caches."""
MOST_ROWS = 64
"""In one insert. Times the columns of our widest table it stays far below both databases' limits."""
MOST_NAMES = 1024
"""In one IN list; likewise."""

MAX_INDEXED_CHARS = 256
"""As many as a name may have (MAX_NAME_CHARS in store/names.py)."""

_IN = "__[POSTCOMPILE_names]"


def chunks(values: Iterable[T], size: int = MAX_VARIABLES) -> Iterator[list[T]]:
    listed = list(values)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]


def insert_missing(conn: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet, in key order; all rows name the same columns.

    The order is what keeps two Postgres writers that insert the same keys from waiting for each other.
    """
    _insert(conn, table, rows, ())


def insert_or_update(
    conn: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]], updated: tuple[str, ...]
) -> None:
    """As `insert_missing`; of rows whose key is there already, the `updated` columns are set."""
    _insert(conn, table, rows, updated)


def _insert(
    conn: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]], updated: tuple[str, ...]
) -> None:
    ordered = sorted(rows, key=itemgetter(*_keys(table)))
    if not ordered:
        return
    columns = tuple(ordered[0])
    as_json = _json_columns(table)
    for part in _in_powers(ordered, MOST_ROWS):
        values: list[Any] = []
        for row in part:
            values += [_json_text(row[name]) if name in as_json else row[name] for name in columns]
        run(conn, _insert_text(table, columns, len(part), updated, conn.dialect.name), values)


def existing(conn: sa.Connection, column: sa.Column[Any], values: Iterable[Any]) -> set[Any]:
    """Those of the values that the (indexed) column holds."""
    return {row[0] for row in rows_in(conn, _select(column), values)}


def rows_in(conn: sa.Connection, query: sa.Select[Any], names: Iterable[Any]) -> list[Sequence[Any]]:
    """The rows of a query built with `names_in`, as the driver gives them; equal names are asked for once."""
    found: list[Sequence[Any]] = []
    ordered = sorted(set(names))
    for start in range(0, len(ordered), MOST_NAMES):
        part = ordered[start : start + MOST_NAMES]
        size = 1 << (len(part) - 1).bit_length()
        part += [part[-1]] * (size - len(part))
        found += run(conn, _query_text(query, size, conn.dialect.name), part)
    return found


def update_in(conn: sa.Connection, statement: sa.Update, names: Sequence[Any]) -> None:
    """Carry out an update built with `names_in` (its only parameter)."""
    for part in _in_powers(sorted(set(names)), MOST_NAMES):
        run(conn, _query_text(statement, len(part), conn.dialect.name), part)


def update_each(conn: sa.Connection, statement: sa.Update, rows: Sequence[Mapping[str, Any]]) -> None:
    """Carry out an update for each of the rows, whose names are the statement's parameters."""
    text, names = _update_text(statement, conn.dialect.name)
    if names is None:
        conn.exec_driver_sql(text, [dict(row) for row in rows])
    else:
        conn.exec_driver_sql(text, [tuple(row[name] for name in names) for row in rows])


def run(conn: sa.Connection, text: str, values: Sequence[Any]) -> list[Any]:
    """Hand a statement straight to the driver; the rows, if it gives any. Failures are SQLAlchemy's."""
    cursor = conn.connection.cursor()
    try:
        cursor.execute(text, values)
        return [] if cursor.description is None else list(cursor.fetchall())
    except conn.dialect.loaded_dbapi.Error as error:
        base = conn.dialect.loaded_dbapi.Error
        raise sa.exc.DBAPIError.instance(
            text, None, error, base, hide_parameters=True, dialect=conn.dialect
        ) from error
    finally:
        cursor.close()


def names_in(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """`column IN (:names)`, for `rows_in` and `update_in`."""
    return column.in_(sa.bindparam("names", expanding=True))


def json_value(stored: Any) -> Any:
    """A JSON column as `rows_in` gives it: text from SQLite, a value from Postgres."""
    return orjson.loads(stored) if isinstance(stored, str) else stored


def _json_text(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value)


def _in_powers(rows: list[T], most: int) -> Iterator[list[T]]:
    """The rows in order, in parts whose sizes are powers of two, the large ones first."""
    start = 0
    while start < len(rows):
        size = min(most, 1 << ((len(rows) - start).bit_length() - 1))
        yield rows[start : start + size]
        start += size


@cache
def _dialect(name: str) -> sa.Dialect:
    return sa.make_url("sqlite://" if name == "sqlite" else "postgresql+psycopg://").get_dialect()()


@cache
def _keys(table: sa.Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.primary_key.columns)


@cache
def _json_columns(table: sa.Table) -> frozenset[str]:
    return frozenset(column.name for column in table.c if isinstance(column.type, sa.JSON))


@cache
def _select(column: sa.Column[Any]) -> sa.Select[Any]:
    return sa.select(column).where(names_in(column))


@cache
def _insert_text(
    table: sa.Table, columns: tuple[str, ...], num_rows: int, updated: tuple[str, ...], dialect: str
) -> str:
    slots = [
        "?" if dialect == "sqlite" else "%s::jsonb" if column in _json_columns(table) else "%s"
        for column in columns
    ]
    row = f"({', '.join(slots)})"
    names = ", ".join(f'"{column}"' for column in columns)
    keys = ", ".join(f'"{key}"' for key in _keys(table))
    # Nothing is done whatever the conflict: of two writers that insert one group at once, Postgres may let
    # the second meet its other unique constraint (task and batch) before its key.
    action = "ON CONFLICT DO NOTHING"
    if updated:
        values = ", ".join(f'"{name}" = excluded."{name}"' for name in updated)
        action = f"ON CONFLICT ({keys}) DO UPDATE SET {values}"
    return f'INSERT INTO "{table.name}" ({names}) VALUES {", ".join([row] * num_rows)} {action}'


@cache
def _query_text(statement: sa.Select[Any] | sa.Update, num_names: int, dialect: str) -> str:
    text = str(statement.compile(dialect=_dialect(dialect)))
    assert text.count(_IN) == 1, "a statement without names_in"
    slot = "?" if dialect == "sqlite" else "%s"
    return text.replace(_IN, ", ".join([slot] * num_names))


@cache
def _update_text(statement: sa.Update, dialect: str) -> tuple[str, Sequence[str] | None]:
    """Its text and, where parameters go by position, their names in order."""
    compiled = statement.compile(dialect=_dialect(dialect))
    return str(compiled), getattr(compiled, "positiontup", None)


def storable_text(value: str) -> str:
    """What a database takes of any string that an agent can send: no NUL, no lone surrogates."""
    if "\x00" in value:
        value = value.replace("\x00", "\ufffd")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def optional_text(value: str | None) -> str | None:
    return None if value is None else storable_text(value)


def indexed_text(value: str | None) -> str | None:
    """Text of any length that somebody else chose, for a column with an index: Postgres refuses entries of
    more than 2704 bytes. A long one keeps its beginning and a hash of the whole: equal ones stay equal."""
    text = optional_text(value)
    if text is None or len(text) <= MAX_INDEXED_CHARS:
        return text
    return f"{text[:MAX_INDEXED_CHARS]}…{blake2b(text.encode(), digest_size=16).hexdigest()}"


def storable_json(value: Any) -> Any:
    """A JSON value that JSONB takes: text as above, numbers that are not finite as text."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {storable_text(str(key)): storable_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [storable_json(item) for item in value]
    return value
