"""Token ids and logprobs as bytes, and prompts as chains of content-addressed blocks.

A prompt is cut into blocks of BLOCK_TOKENS; a block's hash covers its parent's hash and its own ids, so that
equal prefixes are equal chains and are stored once. Knows nothing of calls.

Size of a block: every call stores one partial last block that its next turn can't share (half a block on
average), and every block costs about 110 bytes of row and index. For turns of some 800 tokens the sum is
least between 128 and 512 tokens and flat there; 256 also keeps a 16k-token prompt at 64 rows.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

import sqlalchemy as sa

from ..errors import StoreError
from ..records import Logprobs, TokenIds, token_ids
from .schema import token_blocks
from .statements import chunks, existing, insert_missing

A = TypeVar("A", "array[int]", "array[float]")

BLOCK_TOKENS = 256
_ROOT = bytes(16)  # parent of a first block
_U16, _U32 = b"\x02", b"\x04"  # first byte of packed ids: bytes per id


def _little_endian(values: A) -> A:
    if sys.byteorder == "big":  # the log may be read on another machine
        values = values[:]
        values.byteswap()
    return values


def pack_ids(ids: TokenIds) -> bytes:
    """Two bytes per id where all fit, else four; a leading byte says which."""
    if not ids or max(ids) < 65_536:
        return _U16 + _little_endian(array("H", ids)).tobytes()
    return _U32 + _little_endian(token_ids(ids)).tobytes()


def unpack_ids(packed: bytes) -> TokenIds:
    values: array[int] = array("H" if packed[:1] == _U16 else "I")
    values.frombytes(packed[1:])
    values = _little_endian(values)
    return values if values.typecode == "I" else array("I", values)


def pack_floats(values: Logprobs) -> bytes:
    """Four bytes per value: the very bits that came, NaN and infinities included."""
    return _little_endian(values).tobytes()


def unpack_floats(packed: bytes) -> Logprobs:
    values: array[float] = array("f")
    values.frombytes(packed)
    return _little_endian(values)


def block_hash(parent: bytes | None, ids: TokenIds) -> bytes:
    """blake2b-128 over the parent's hash and the ids as 32-bit words, whatever their encoding in the row."""
    return blake2b((parent or _ROOT) + _little_endian(ids).tobytes(), digest_size=16).digest()


def store_prompt(conn: sa.Connection, ids: TokenIds) -> bytes | None:
    """Store the chain; the last block's hash names the prompt. None for an empty prompt."""
    return store_prompts(conn, [ids])[0]


def store_prompts(conn: sa.Connection, prompts: Sequence[TokenIds]) -> list[bytes | None]:
    """As store_prompt for many, in two statements: blocks that are there already are not sent again."""
    cut = PromptBlocks()
    names = [cut.add(ids) for ids in prompts]
    cut.store(conn)
    return names


class PromptBlocks:
    """The blocks of some prompts: named first, stored later."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[bytes | None, TokenIds, int]] = {}

    def add(self, ids: TokenIds) -> bytes | None:
        """The prompt's name; None for an empty one."""
        parent: bytes | None = None
        for start in range(0, len(ids), BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            name = block_hash(parent, block)
            self._blocks[name] = (parent, block, start + len(block))
            parent = name
        return parent

    def store(self, conn: sa.Connection) -> None:
        present = existing(conn, token_blocks.c.hash, self._blocks)
        insert_missing(
            conn,
            token_blocks,
            (
                {"hash": name, "parent": parent, "ids": pack_ids(block), "num_tokens": end}
                for name, (parent, block, end) in self._blocks.items()
                if name not in present
            ),
        )


def load_prompts(conn: sa.Connection, names: Iterable[bytes]) -> dict[bytes, TokenIds]:
    """The prompts of these names. One recursive query per thousand; a shared block is read and decoded once.

    Raises StoreError where a block is missing.
    """
    wanted = set(names)
    blocks: dict[bytes, tuple[bytes | None, TokenIds]] = {}
    for chunk in chunks(sorted(wanted - blocks.keys())):
        for name, parent, packed in conn.execute(_chains(conn, chunk)):
            blocks[name] = (parent, unpack_ids(packed))
    return {name: _joined(name, blocks) for name in wanted}


def _chains(conn: sa.Connection, names: list[bytes]) -> sa.Select[bytes, bytes | None, bytes]:
    """All blocks on the way from these to their roots. UNION, not UNION ALL, visits a shared block once."""
    start = sa.select(token_blocks.c.hash, token_blocks.c.parent).where(token_blocks.c.hash.in_(names))
    chain = start.cte("chain", recursive=True)
    if conn.dialect.name == "sqlite":  # which looks each block up in its index by itself
        parents = sa.select(token_blocks.c.hash, token_blocks.c.parent).join(
            chain, token_blocks.c.hash == chain.c.parent
        )
        chain = chain.union(parents)
        return sa.select(token_blocks.c.hash, token_blocks.c.parent, token_blocks.c.ids).join(
            chain, token_blocks.c.hash == chain.c.hash
        )
    # Postgres takes a chain for long and reads the whole table instead; OFFSET 0 makes it look up each block.
    above = sa.select(token_blocks.c.hash, token_blocks.c.parent)
    above_each = above.where(token_blocks.c.hash == chain.c.parent).offset(0).lateral("above")
    chain = chain.union(
        sa.select(above_each.c.hash, above_each.c.parent).select_from(chain.join(above_each, sa.true()))
    )
    block = sa.select(token_blocks.c.hash, token_blocks.c.parent, token_blocks.c.ids)
    each = block.where(token_blocks.c.hash == chain.c.hash).offset(0).lateral("block")
    return sa.select(each.c.hash, each.c.parent, each.c.ids).select_from(chain.join(each, sa.true()))


def _joined(name: bytes, blocks: dict[bytes, tuple[bytes | None, TokenIds]]) -> TokenIds:
    chain: list[TokenIds] = []
    at: bytes | None = name
    while at is not None:
        if at not in blocks:
            raise StoreError(f"the log is damaged: token block {at.hex()} of prompt {name.hex()} is missing")
        at, ids = blocks[at]
        chain.append(ids)
    prompt = token_ids()
    for ids in reversed(chain):
        prompt.extend(ids)
    return prompt
