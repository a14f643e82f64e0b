"""Collecting what nothing refers to any more: token blocks and body parts, beside live writers.

A block is found by indexes: nothing has it as its parent, and no call as its prompt's last. Body parts are
named in the calls' packed skeletons only, so all calls are looked through first, without any lock; then,
under the lock that writers share (store/sharing.py), only those that came since. Nothing is collected unless
it is sure, under the lock, that no call has been overlooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import sqlalchemy as sa

from ..records import now_ms
from .bodies import part_names
from .database import Database
from .schema import body_parts, calls, token_blocks
from .sharing import collect
from .statements import chunks

PAGE_ROWS = 500
PARTS_PER_PASS = 500_000
"""Names held in memory at once (some 100 bytes each); a log with more is looked through several times."""
PARTS_PER_LOCK = 500
"""Deleted while writers wait: some 10 ms."""
SETTLED_MS = 10_000
"""Calls older than this are looked through beforehand; ids of later ones may still be on their way in."""
MAX_ATTEMPTS = 3

_child = token_blocks.alias("child")
_unreferenced = sa.and_(
    ~sa.exists().where(calls.c.prompt_block == token_blocks.c.hash),
    ~sa.exists().where(_child.c.parent == token_blocks.c.hash),
)


def collect_chains(conn: sa.Connection, ends: Iterable[bytes]) -> int:
    """Delete these blocks, and then their parents, as far as nothing else refers to them; how many.

    In a transaction that has called `sharing.collect`.
    """
    num_deleted = 0
    candidates = set(ends)
    while candidates:
        parents: set[bytes] = set()
        for chunk in chunks(sorted(candidates)):
            query = token_blocks.delete().where(token_blocks.c.hash.in_(chunk), _unreferenced)
            deleted = conn.execute(query.returning(token_blocks.c.parent)).scalars().all()
            num_deleted += len(deleted)
            parents.update(parent for parent in deleted if parent is not None)
        candidates = parents
    return num_deleted


def collect_blocks(database: Database) -> int:
    """Chains whose last block nothing refers to: what an interrupted program may leave. How many blocks."""
    num_deleted = 0
    while True:
        with database.read() as conn:
            ends = (
                conn.execute(sa.select(token_blocks.c.hash).where(_unreferenced).limit(PAGE_ROWS))
                .scalars()
                .all()
            )
        if not ends:
            return num_deleted
        with database.write() as conn:
            collect(conn)
            deleted = collect_chains(conn, ends)
        num_deleted += deleted
        if not deleted:  # all of them are in use again
            return num_deleted


def collect_parts(database: Database, on_progress: Callable[[int], None] = lambda rows: None) -> int:
    """Delete the body parts that no call refers to; how many. `on_progress`: calls looked through.

    What can't be settled because calls kept coming in behind our back is left for the next time.
    """
    with database.read() as conn:
        total = conn.execute(sa.select(sa.func.count()).select_from(body_parts)).scalar_one()
    passes = max(1, -(-total // PARTS_PER_PASS))
    bounds = [bytes([256 * number // passes]) for number in range(passes)]
    return sum(
        _collect_range(database, low, high, on_progress)
        for low, high in zip(bounds, [*bounds[1:], None], strict=True)
    )


def unreferenced_parts(database: Database) -> int:
    """How many `collect_parts` would find, in one snapshot."""
    with database.read() as conn:
        total = set(conn.execute(sa.select(body_parts.c.hash)).scalars())
        for names in _referenced(conn, None):
            total -= names
    return len(total)


def _collect_range(
    database: Database, low: bytes, high: bytes | None, on_progress: Callable[[int], None]
) -> int:
    num_deleted = 0
    for _ in range(MAX_ATTEMPTS):
        settled = f"{now_ms() - SETTLED_MS:012x}"
        with database.read() as conn:
            query = sa.select(body_parts.c.hash).where(body_parts.c.hash >= low)
            if high is not None:
                query = query.where(body_parts.c.hash < high)
            candidates = set(conn.execute(query).scalars())
            num_seen = 0
            for names in _referenced(conn, calls.c.id <= settled):
                candidates -= names
                num_seen += 1
                on_progress(1)
        deleted, is_settled = _delete_parts(database, candidates, settled, num_seen)
        num_deleted += deleted
        if is_settled:
            break
    return num_deleted


def _delete_parts(
    database: Database, candidates: set[bytes], settled: str, num_seen: int
) -> tuple[int, bool]:
    """How many were deleted, and whether all could be: False where a call was overlooked."""
    num_deleted = 0
    while candidates:
        with database.write() as conn:
            collect(conn)
            count = sa.select(sa.func.count()).select_from(calls).where(calls.c.id <= settled)
            if conn.execute(count).scalar_one() != num_seen:
                return num_deleted, False
            for names in _referenced(conn, calls.c.id > settled):
                candidates -= names
            some = sorted(candidates)[:PARTS_PER_LOCK]
            conn.execute(body_parts.delete().where(body_parts.c.hash.in_(some)))
        num_deleted += len(some)
        candidates -= set(some)
    return num_deleted, True


def _referenced(conn: sa.Connection, where: sa.ColumnElement[bool] | None) -> Iterator[set[bytes]]:
    """Per call, the parts that it refers to."""
    query = sa.select(calls.c.request_body)
    if where is not None:
        query = query.where(where)
    for (skeleton,) in conn.execute(query, execution_options={"yield_per": PAGE_ROWS}):
        yield set() if skeleton is None else set(part_names(skeleton))
