"""Pieces of SQL and cleaning that the other files of the store share; knows no table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")

MAX_VARIABLES = 1000
"""Values in one IN list: far below both databases' limits, and few enough forms for their plan caches."""


def chunks(values: Iterable[T], size: int = MAX_VARIABLES) -> Iterator[list[T]]:
    listed = list(values)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]


def insert_missing(conn: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet, in key order.

    The order is what keeps two Postgres writers that insert the same keys from waiting for each other.
    """
    keys = [column.name for column in table.primary_key.columns]
    ordered = sorted(rows, key=lambda row: tuple(row[key] for key in keys))
    if not ordered:
        return
    conn.execute(_insert_statement(table, conn.dialect.name), ordered)


def existing(conn: sa.Connection, column: sa.Column[Any], values: Iterable[Any]) -> set[Any]:
    """Those of the values that the (indexed) column holds."""
    found: set[Any] = set()
    for chunk in chunks(sorted(set(values))):
        found.update(conn.execute(_existing_statement(column), {"names": chunk}).scalars())
    return found


def names_in(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """`column IN (:names)` in a statement built once: on the hot path building costs more than running."""
    return column.in_(sa.bindparam("names", expanding=True))


@cache
def _insert_statement(table: sa.Table, dialect: str) -> Any:
    insert: Any = sqlite.insert if dialect == "sqlite" else postgresql.insert
    return insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))


@cache
def _existing_statement(column: sa.Column[Any]) -> Any:
    return sa.select(column).where(names_in(column))


def storable_text(value: str) -> str:
    """What a database takes of any string that an agent can send: no NUL, no lone surrogates."""
    if "\x00" in value:
        value = value.replace("\x00", "\ufffd")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def optional_text(value: str | None) -> str | None:
    return None if value is None else storable_text(value)


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
