"""One file, a row per line: a first line that says what it is, a last one with counts and a checksum.

The file has its name only once it is whole. A gz at the end of the name packs it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import orjson
import sqlalchemy as sa

from ...errors import UserError
from .rows import TABLES, Row, Rows
from .values import ValueFaultError, from_json, require_complete, to_json

FORMAT = "lightning-log"
VERSION = 1

_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_BY_NAME = {table.name: table for table in TABLES}


def write_jsonl(file: Path, header: dict[str, Any], rows: Iterable[Rows]) -> Counter[str]:
    """Rows by table."""
    counts: Counter[str] = Counter()
    partial = file.with_name(file.name + ".partial")
    digest = blake2b(digest_size=16)
    try:
        with _open(partial, "wb", file) as out:

            def write(line: Any) -> None:
                # Python's own encoder writes every float so that it reads back the same.
                text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
                digest.update(text)
                out.write(text)

            write({"format": FORMAT, "version": VERSION, **header})
            for table, page in rows:
                for row in page:
                    write({"table": table.name, "row": _encoded(table, row)})
                counts[table.name] += len(page)
            checksum = digest.hexdigest()
            write({"end": FORMAT, "rows": +counts, "checksum": checksum})
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return counts


def _encoded(table: sa.Table, row: Row) -> Row:
    """Without the columns that hold nothing."""
    return {name: to_json(table.c[name], value) for name, value in row.items() if value is not None}


def read_jsonl(file: Path) -> Iterator[tuple[sa.Table, Row]]:
    """Row by row. UserError with the line for whatever is not as it was written."""
    digest = blake2b(digest_size=16)
    counts: Counter[str] = Counter()
    is_whole = False
    number = 0
    try:
        with _open(file, "rb", file) as lines:
            for number, text in enumerate(lines, 1):
                line = _line(file, number, text)
                if number == 1:
                    _check_header(file, line)
                elif "end" in line:
                    is_whole = line.get("rows") == counts and line.get("checksum") == digest.hexdigest()
                    break
                else:
                    yield _row(file, number, line)
                    counts[line["table"]] += 1
                digest.update(text)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{file}: {error or 'the file ends too early'}; nothing was imported, export it anew"
        ) from None
    if not is_whole:
        raise UserError(
            f"{file} is cut off or was changed (after line {number}); nothing was imported, export it anew"
        )


def _line(file: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        try:
            # orjson would make floats of integers that have more than 64 bits.
            line = json.loads(text) if _LONG_NUMBER.search(text) else orjson.loads(text)
        except orjson.JSONDecodeError:
            line = json.loads(text)  # takes halves of surrogate pairs, which an engine may send
    except RecursionError:
        raise UserError(f"{file}, line {number}: nested too deep for a row; nothing was imported") from None
    except ValueError as error:
        raise UserError(f"{file}, line {number}: {error}; nothing was imported, export it anew") from None
    if not isinstance(line, dict):
        raise UserError(f"{file}, line {number}: not a row of a log; nothing was imported")
    return line


def _check_header(file: Path, line: dict[str, Any]) -> None:
    if line.get("format") != FORMAT:
        raise UserError(f"{file} is not an export of a log (its first line says nothing of {FORMAT!r})")
    if line.get("version") != VERSION:
        raise UserError(
            f"{file} was written by a newer lightning-rl (format {line.get('version')}, this program reads "
            f"{VERSION}); pip install -U lightning-rl"
        )


def _row(file: Path, number: int, line: dict[str, Any]) -> tuple[sa.Table, Row]:
    table = _BY_NAME.get(str(line.get("table")))
    given = line.get("row")
    if table is None or not isinstance(given, dict):
        raise UserError(f"{file}, line {number}: not a row of a log; nothing was imported")
    unknown = given.keys() - table.c.keys()
    if unknown:
        raise UserError(
            f"{file}, line {number}: {table.name} has no {min(unknown)!r} here; it was written by a newer "
            "lightning-rl: pip install -U lightning-rl"
        )
    try:
        row = {column.name: from_json(column, given.get(column.name)) for column in table.c}
        require_complete(table, row)
    except ValueFaultError as error:
        raise UserError(f"{file}, line {number}: {error}; nothing was imported, export it anew") from None
    return table, row


def _open(path: Path, mode: str, named: Path) -> IO[bytes]:
    opened: Any = gzip.open if named.suffix == ".gz" else open
    return opened(path, mode)  # type: ignore[no-any-return]
