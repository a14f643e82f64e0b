"""Packing and hashing of tokens, without a database; chains on SQLite."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.errors import StoreError
from lightning_rl.records import logprobs, token_ids
from lightning_rl.store.blocks import (
    BLOCK_TOKENS,
    block_hash,
    load_prompts,
    pack_floats,
    pack_ids,
    store_prompt,
    unpack_floats,
    unpack_ids,
)
from lightning_rl.store.database import Database
from lightning_rl.store.schema import token_blocks

small, large = st.integers(0, 65_535), st.integers(0, 2**32 - 1)


@given(st.lists(small) | st.lists(large))
def test_ids_come_back_and_small_ones_take_two_bytes(values: list[int]) -> None:
    packed = pack_ids(token_ids(values))
    assert unpack_ids(packed) == token_ids(values)
    width = 2 if max(values, default=0) < 65_536 else 4
    assert len(packed) == 1 + width * len(values)


@given(st.lists(st.floats(width=32)))
def test_floats_come_back_bit_for_bit(values: list[float]) -> None:
    array = logprobs(values)
    assert unpack_floats(pack_floats(array)).tobytes() == array.tobytes()


def test_the_bytes_are_little_endian_on_every_machine() -> None:
    assert pack_ids(token_ids([1, 258])) == b"\x02\x01\x00\x02\x01"
    assert pack_ids(token_ids([65_536])) == b"\x04\x00\x00\x01\x00"
    assert pack_floats(logprobs([-0.5])) == b"\x00\x00\x00\xbf"


def test_a_block_s_hash_covers_what_came_before_it() -> None:
    ids = token_ids([1, 2])
    assert block_hash(None, ids) != block_hash(block_hash(None, ids), ids)
    # blake2b-128 of 16 zero bytes and the words 1 and 2; pinned, since a log must stay readable for years.
    assert block_hash(None, ids).hex() == "5755319e7435b6b328396542a9e681c9"


def test_a_missing_block_is_said_not_guessed(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    with database.write() as conn:
        name = store_prompt(conn, token_ids(range(2 * BLOCK_TOKENS + 1)))
        assert name is not None
        conn.execute(token_blocks.delete().where(token_blocks.c.parent.is_(None)))
        with pytest.raises(StoreError, match="damaged"):
            load_prompts(conn, [name])
    database.close()


def test_a_long_prompt_is_one_query_by_the_primary_key(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/log.db")
    with database.write() as conn:
        names = [store_prompt(conn, token_ids([turn] * 16_384)) for turn in range(8)]
    statements: list[tuple[str, object]] = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
    with database.read() as conn:
        loaded = load_prompts(conn, [name for name in names if name is not None])
    assert [len(prompt) for prompt in loaded.values()] == [16_384] * 8
    queries = [(text, values) for text, values in statements if text != "BEGIN"]
    assert len(queries) == 1
    with database.engine.connect() as conn:
        plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {queries[0][0]}", queries[0][1]).all()
    assert [row[3] for row in plan if "SCAN token_blocks" in row[3]] == []
    database.close()
