"""What `verify` must find, on every database; a log as it should be, and one fault at a time."""

from __future__ import annotations

import sqlalchemy as sa
from fakes.full_log import fill
from fakes.log_rows import end, intent
from fakes.store_behaviours import behaviour, write

from lightning_rl.store.bodies import part_name
from lightning_rl.store.database import Database
from lightning_rl.store.schema import (
    body_parts,
    calls,
    choices,
    episodes,
    events,
    manifest_choices,
    policy_versions,
    rewards,
    token_blocks,
)
from lightning_rl.store.verify import Findings, count_rows, verify


def damage(database: Database, *statements: sa.Executable) -> Findings:
    """What is found after these; the log is put back as it was."""
    with database.engine.connect() as conn, conn.begin() as transaction:
        for statement in statements:
            assert conn.execute(statement).rowcount == 1, statement
        transaction.commit()
    return verify(database)


@behaviour
def test_a_log_as_it_should_be_has_no_fault(database: Database) -> None:
    assert verify(database).num_faults == 0
    fill(database)
    seen: list[int] = []
    found = verify(database, seen.append)
    assert found.faults == []
    assert sum(seen) == count_rows(database)
    assert found.num_rows["calls"] == 4 * 3 + 6
    assert found.notes["open_calls"] == 1
    assert found.notes["orphaned_blocks"] == found.notes["orphaned_parts"] == 0


def one_of(database: Database, query: sa.Select[bytes]) -> bytes:
    with database.read() as conn:
        return conn.execute(query.limit(1)).scalar_one()


@behaviour
def test_a_body_that_is_not_the_one_of_its_hash_is_found(database: Database) -> None:
    body = b'{"model": "gpt-4o", "messages": [{"role": "user", "content": "%s"}]}' % (b"1" * 200)
    for name, image in (("c1", body), ("c2", b"no json"), ("c3", b"")):
        write(database, intent(name, body=image, request_hash=part_name(image)), end(name, [1]))
    assert verify(database).faults == []
    skeleton = one_of(database, sa.select(calls.c.request_body).where(calls.c.id == "c1"))
    other = skeleton.replace(b"gpt-4o", b"gpt-5o")
    assert other != skeleton
    found = damage(database, calls.update().where(calls.c.id == "c1").values(request_body=other))
    assert [(fault.key, fault.what) for fault in found.faults] == [
        ("c1", "its request body is not the one of its hash")
    ]


@behaviour
def test_each_fault_is_found_with_its_row(database: Database) -> None:
    fill(database)
    block = one_of(database, sa.select(token_blocks.c.hash).where(token_blocks.c.parent.is_(None)))
    part = one_of(database, sa.select(body_parts.c.hash))
    packed = one_of(database, sa.select(token_blocks.c.ids).where(token_blocks.c.hash == block))
    one = calls.c.id == "a0.1"
    answer = choices.c.call_id == "a0.1"
    faults = [
        (
            token_blocks.update().where(token_blocks.c.hash == block).values(ids=packed[:-2] + b"\x01\x01"),
            ("token_blocks", block.hex(), "hash"),
        ),
        (
            body_parts.update().where(body_parts.c.hash == part).values(bytes=b"x"),
            ("body_parts", part.hex(), "hash"),
        ),
        (calls.update().where(one).values(num_prompt_tokens=7), ("calls", "a0.1", "says 7")),
        (calls.update().where(one).values(prompt_block=b"no such block"), ("calls", "a0.1", "is missing")),
        (calls.update().where(one).values(status="open"), ("calls", "a0.1", "its end is there")),
        (calls.update().where(one).values(ordinal=2), ("episodes", "a0", "3 calls share 2 places")),
        (calls.update().where(one).values(ordinal=3), ("episodes", "a0", "counter is at 3")),
        (
            calls.update().where(one).values(request_body=b"\x01no zlib"),
            ("calls", "a0.1", "can't be unpacked"),
        ),
        (choices.update().where(answer).values(num_tokens=3), ("choices", "a0.1/0", "says that it has 3")),
        (
            choices.update().where(answer).values(behavior_logprobs=b"\x00\x00\x00\x00"),
            ("choices", "a0.1/0", "as many logprobs"),
        ),
        (
            choices.update().where(answer).values(behavior_logprobs=b"\x00\x00\xc0\x7f" * 20),
            ("choices", "a0.1/0", "not finite"),
        ),
        (
            choices.update().where(answer).values(finish_reason=None),
            ("choices", "a0.1/0", "finish reason is None"),
        ),
        (choices.update().where(answer).values(quarantine="mood"), ("choices", "a0.1/0", "'mood'")),
        (episodes.update().where(episodes.c.id == "a0").values(num_calls=9), ("episodes", "a0", "counted 9")),
        (
            episodes.update().where(episodes.c.id == "a0").values(status="excluded"),
            ("episodes", "a0", "newest event says ended"),
        ),
        (episodes.update().where(episodes.c.id == "odd").values(has_gap=False), ("episodes", "odd", "gap")),
        (
            episodes.update().where(episodes.c.id == "a0").values(task_id="z"),
            ("episodes", "a0", "its group's"),
        ),
        (
            rewards.update().where(rewards.c.id == "r-tokens").values(call_id="x"),
            ("rewards", "r-tokens", "missing"),
        ),
        (
            rewards.update().where(rewards.c.id == "r-tokens").values(token_end=99),
            ("rewards", "r-tokens", "within"),
        ),
        (
            rewards.update().where(rewards.c.id == "r-judge2").values(supersedes="x"),
            ("rewards", "r-judge2", "'x'"),
        ),
        (
            rewards.update().where(rewards.c.id == "r-a0").values(target="mood"),
            ("rewards", "r-a0", "target is 'mood'"),
        ),
        (
            episodes.update().where(episodes.c.id == "a0").values(purpose="fun"),
            ("episodes", "a0", "purpose is 'fun'"),
        ),
        (rewards.delete().where(rewards.c.id == "r-a0"), ("manifest_episodes", "run/0/a0", "'r-a0'")),
        (
            manifest_choices.update().where(manifest_choices.c.call_id == "a0.1").values(choice_index=5),
            ("manifest_choices", "run/0/a0.1/5", "missing"),
        ),
        (
            policy_versions.update().where(policy_versions.c.version == 0).values(status="live"),
            ("policy_versions", "policy/0", "newest event says draining"),
        ),
        (
            events.update().where(events.c.kind == "failed").values(subject_id="nobody"),
            ("events", None, "no episode 'nobody'"),
        ),
    ]
    for statement, (table, key, words) in faults:
        before = _rows(database, statement.table)
        found = damage(database, statement)
        match = [fault for fault in found.faults if fault.table == table and words in fault.what]
        assert match, (str(statement), found.faults)
        assert key in (None, match[0].key)
        assert match[0].todo
        _restore(database, statement.table, before)
        assert verify(database).faults == []


def _rows(database: Database, table: sa.Table) -> list[dict[str, object]]:
    with database.read() as conn:
        return [dict(row._mapping) for row in conn.execute(sa.select(table))]


def _restore(database: Database, table: sa.Table, rows: list[dict[str, object]]) -> None:
    key = list(table.primary_key.columns)
    with database.write() as conn:
        there = {tuple(row) for row in conn.execute(sa.select(*key))}
        for row in rows:
            named = [column == row[column.name] for column in key]
            if tuple(row[column.name] for column in key) in there:
                conn.execute(table.update().where(*named).values(row))
            else:
                conn.execute(table.insert(), row)
        if len(there) == len(rows):  # a key that was changed: the changed row has to go
            wanted = {tuple(row[column.name] for column in key) for row in rows}
            for odd in there - wanted:
                conn.execute(table.delete().where(*(c == v for c, v in zip(key, odd, strict=True))))


@behaviour
def test_rows_that_nothing_refers_to_are_counted_not_faults(database: Database) -> None:
    fill(database)
    with database.write() as conn:
        gone = ["b0.0", "b0.1", "b0.2"]
        conn.execute(
            calls.update().where(calls.c.id.in_(gone)).values(prompt_block=None, num_prompt_tokens=None)
        )
        conn.execute(calls.update().where(calls.c.id.in_(gone)).values(request_body=None))
        conn.execute(choices.update().where(choices.c.call_id.in_(gone)).values(quarantine="redacted"))
    found = verify(database)
    assert found.faults == []
    assert found.notes["orphaned_blocks"] == 3  # the last block of each turn
    assert found.notes["orphaned_parts"] == 4
