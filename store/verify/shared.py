"""Token blocks and body parts: every hash is derived anew, and what nothing refers to is counted."""

from __future__ import annotations

import zlib

import sqlalchemy as sa

from ..blocks import block_hash, unpack_ids
from ..bodies import part_name, unpack_part
from ..schema import body_parts, calls, token_blocks
from .report import RESTORE, Findings


def check_blocks(conn: sa.Connection, findings: Findings) -> None:
    parent = token_blocks.alias("parent")
    query = sa.select(
        token_blocks, parent.c.hash.label("found"), parent.c.num_tokens.label("before")
    ).outerjoin(parent, parent.c.hash == token_blocks.c.parent)
    for page in findings.pages(conn, "token_blocks", query):
        for row in page:
            _check_block(row.hash, row.parent, row.ids, row.num_tokens, row.found, row.before, findings)
    findings.notes["orphaned_blocks"] += _count(conn, orphaned_blocks())


def _check_block(  # noqa: PLR0917 - a row's columns
    name: bytes,
    parent: bytes | None,
    packed: bytes,
    num_tokens: int,
    found: bytes | None,
    before: int | None,
    findings: Findings,
) -> None:
    try:
        ids = unpack_ids(packed)
    except ValueError:
        findings.fault("token_blocks", name, "its ids can't be unpacked", RESTORE)
        return
    if block_hash(parent, ids) != name:
        findings.fault("token_blocks", name, "its hash is not that of its parent and ids", RESTORE)
    if parent is not None and found is None:
        findings.fault("token_blocks", name, f"its parent {parent.hex()} is missing", RESTORE)
    elif num_tokens != (before or 0) + len(ids):
        what = f"it says that it ends at token {num_tokens}, its chain ends at {(before or 0) + len(ids)}"
        findings.fault("token_blocks", name, what, RESTORE)


def orphaned_blocks() -> sa.Select[bytes]:
    """Ends of chains that no call and no other block refers to."""
    child = token_blocks.alias("child")
    return sa.select(token_blocks.c.hash).where(
        ~sa.exists().where(calls.c.prompt_block == token_blocks.c.hash),
        ~sa.exists().where(child.c.parent == token_blocks.c.hash),
    )


def check_parts(conn: sa.Connection, findings: Findings, referenced: set[bytes] | None) -> None:
    """`referenced`: all that calls refer to; None where there were too many to remember."""
    for page in findings.pages(conn, "body_parts", sa.select(body_parts)):
        for row in page:
            try:
                is_whole = part_name(unpack_part(row.bytes)) == row.hash
            except (zlib.error, ValueError):
                is_whole = False
            if not is_whole:
                findings.fault("body_parts", row.hash, "its hash is not that of its bytes", RESTORE)
            if referenced is not None and row.hash not in referenced:
                findings.notes["orphaned_parts"] += 1


def _count(conn: sa.Connection, query: sa.Select[bytes]) -> int:
    return conn.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
