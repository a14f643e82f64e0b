"""A folder with one Parquet file per table, for pandas, DuckDB and the like; `log.json` says what it is.

Ids are lists of integers, logprobs lists of 32-bit floats, messages JSON text, body parts the bytes that the
agent sent. The folder has its name only once it is whole. Needs pyarrow (the extra `parquet`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ...errors import UserError
from ...records import logprobs, token_ids
from ..blocks import pack_floats, pack_ids, unpack_floats, unpack_ids
from ..bodies import pack_json, pack_part, unpack_json, unpack_part
from .jsonl import FORMAT, VERSION
from .rows import TABLES, Row, Rows
from .values import FLOATS, IDS, JSON, PARTS, ValueFaultError, require_complete

HEADER = "log.json"
ROWS_PER_GROUP = 2000


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet needs pyarrow; pip install 'lightning-rl[parquet]'") from None
    return pyarrow


def write_parquet(folder: Path, header: dict[str, Any], rows: Iterable[Rows]) -> Counter[str]:
    """Rows by table."""
    arrow = _arrow()
    counts: Counter[str] = Counter()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with ExitStack() as stack:
            files = {table.name: stack.enter_context(_File(arrow, partial, table)) for table in TABLES}
            for table, page in rows:
                files[table.name].write(page)
                counts[table.name] += len(page)
        document = {"format": FORMAT, "version": VERSION, **header, "rows": counts}
        (partial / HEADER).write_text(json.dumps(document) + "\n")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


class _File:
    """One table's file; rows wait until a row group is full."""

    def __init__(self, arrow: Any, folder: Path, table: sa.Table) -> None:
        self._arrow = arrow
        self._table = table
        self._schema = arrow.schema([(column.name, _type(arrow, column)) for column in table.c])
        self._path = folder / f"{table.name}.parquet"
        self._waiting: list[Row] = []

    def __enter__(self) -> _File:
        self._writer = self._arrow.parquet.ParquetWriter(
            self._path, self._schema, compression="zstd", write_page_checksum=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def write(self, page: list[Row]) -> None:
        self._waiting += page
        if len(self._waiting) >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        columns = {
            column.name: [_to_arrow(column, row[column.name]) for row in self._waiting]
            for column in self._table.c
        }
        self._writer.write_table(self._arrow.table(columns, schema=self._schema))
        self._waiting = []


def read_parquet(folder: Path) -> Iterator[tuple[sa.Table, Row]]:
    """Row by row, in the order in which they can be written."""
    arrow = _arrow()
    expected = _header(folder)["rows"]
    for table in TABLES:
        path = folder / f"{table.name}.parquet"
        count = 0
        try:
            with arrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                unknown = set(file.schema_arrow.names) - set(table.c.keys())
                if unknown:
                    raise UserError(
                        f"{path}: there is no {min(unknown)!r} here; it was written by a newer lightning-rl: "
                        "pip install -U lightning-rl"
                    )
                for batch in file.iter_batches(ROWS_PER_GROUP):
                    for given in batch.to_pylist():
                        yield table, _row(table, given)
                        count += 1
        except (OSError, arrow.ArrowException, ValueFaultError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: {reason}; nothing was imported, export it anew") from None
        if count != expected.get(table.name, 0):
            raise UserError(
                f"{path} holds {count} rows, {HEADER} says {expected.get(table.name, 0)}; "
                "nothing was imported, export it anew"
            )


def _header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / HEADER).read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} is not an export of a log: it has no readable {HEADER}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{folder} is not an export of a log: its {HEADER} says nothing of {FORMAT!r}")
    if header.get("version") != VERSION:
        raise UserError(f"{folder} was written by a newer lightning-rl; pip install -U lightning-rl")
    if not isinstance(header.get("rows"), dict):
        raise UserError(f"{folder} is damaged: its {HEADER} counts no rows; export it anew")
    return header


def _row(table: sa.Table, given: Row) -> Row:
    row = {column.name: _from_arrow(column, given.get(column.name)) for column in table.c}
    require_complete(table, row)
    return row


def _key(column: sa.Column[Any]) -> tuple[str, str]:
    return (str(column.table.name), column.name)


def _type(arrow: Any, column: sa.Column[Any]) -> Any:
    special = {
        **dict.fromkeys(IDS, lambda: arrow.list_(arrow.uint32())),
        **dict.fromkeys(FLOATS, lambda: arrow.list_(arrow.float32())),
        **dict.fromkeys(JSON, arrow.string),
    }
    if _key(column) in special:
        return special[_key(column)]()
    kinds: tuple[tuple[type[Any], Callable[[], Any]], ...] = (
        (sa.LargeBinary, arrow.binary),
        (sa.JSON, arrow.string),
        (sa.Boolean, arrow.bool_),
        (sa.BigInteger, arrow.int64),
        (sa.Integer, arrow.int32),
        (sa.Float, arrow.float64),
    )
    return next((made() for kind, made in kinds if isinstance(column.type, kind)), arrow.string())


def _to_arrow(column: sa.Column[Any], value: Any) -> Any:
    if value is None:
        return None
    key = _key(column)
    if key in IDS:
        return unpack_ids(value)
    if key in FLOATS:
        return unpack_floats(value)
    if key in JSON:
        return json.dumps(unpack_json(value))
    if key in PARTS:
        return unpack_part(value)
    return json.dumps(value) if isinstance(column.type, sa.JSON) else value


def _from_arrow(column: sa.Column[Any], value: Any) -> Any:
    if value is None:
        return None
    key = _key(column)
    if key in IDS:
        return pack_ids(token_ids(value))
    if key in FLOATS:
        return pack_floats(logprobs(value))
    if key in JSON:
        return pack_json(json.loads(value))
    if key in PARTS:
        return pack_part(value)
    return json.loads(value) if isinstance(column.type, sa.JSON) else value
