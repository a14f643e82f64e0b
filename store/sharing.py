"""The lock between those who refer to shared rows (blocks, parts, groups) and those who collect them.

A writer finds that a block is there already and refers to it, without writing it again: between the two,
nobody may collect that block. Writers share the lock, collectors have it for themselves; both hold it until
their transaction ends, and take it before anything else.

So a writer may remember what is there only within its transaction: whatever it remembers beyond, prune may
have collected meanwhile.
"""

from __future__ import annotations

import sqlalchemy as sa

_LOCK_KEY = 0x4C49_4748_5452  # names the Postgres advisory lock


def refer(conn: sa.Connection) -> None:
    """From here on, what this transaction finds in the shared tables stays."""
    if conn.dialect.name == "postgresql":  # on SQLite BEGIN IMMEDIATE has let no other writer in
        conn.execute(_SHARED)


def collect(conn: sa.Connection) -> None:
    """Wait for the writers that are at it, and hold up new ones: keep the transaction short."""
    if conn.dialect.name == "postgresql":
        conn.execute(_EXCLUSIVE)


_SHARED = sa.select(sa.func.pg_advisory_xact_lock_shared(sa.literal(_LOCK_KEY, sa.BigInteger)))
_EXCLUSIVE = sa.select(sa.func.pg_advisory_xact_lock(sa.literal(_LOCK_KEY, sa.BigInteger)))
