"""What deletion must do on every database: all of it, nothing else, and never under a writer's feet."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from fakes.full_log import fill, manifest, messages, play
from fakes.log_rows import end, intent
from fakes.store_behaviours import behaviour, rows_by_table, write

from lightning_rl.errors import UnknownEpisodeError, UserError
from lightning_rl.records import now_ms
from lightning_rl.store import append, collect, read, runs
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.keys import EpisodeKey, add_episode_key
from lightning_rl.store.prune import (
    NOT_ENDED,
    PLANNED,
    RESUMABLE,
    RUNNING,
    Selection,
    only_one,
    plan,
    prune,
)
from lightning_rl.store.run_owners import Owner, take
from lightning_rl.store.schema import calls, episodes, groups
from lightning_rl.store.schema import runs as runs_table
from lightning_rl.store.verify import verify

OUTLIVE = {
    "fingerprints",
    "policy_versions",
    "runs",
    "step_manifests",
    "manifest_episodes",
    "manifest_choices",
}


def delete(database: Database, **selection: Any) -> dict[str, int]:
    """Rows deleted, by table."""
    planned = plan(database, Selection(**selection))
    done = prune(database, Selection(**selection))
    for table in ("episodes", "calls", "choices", "rewards"):
        assert done.rows[table] == planned.rows[table], table
    assert done.left_out == planned.left_out
    done.rows["token_blocks"] += collect.collect_blocks(database)
    done.rows["body_parts"] += collect.collect_parts(database)
    return {name: count for name, count in done.rows.items() if count}


@behaviour
def test_everything_old_goes_and_what_was_trained_stays_known(database: Database) -> None:
    fill(database)
    with database.write() as conn:
        append.create_episode(conn, episode_id="announced", task_id="task-c")
        add_episode_key(conn, b"hash", EpisodeKey("announced", None, None))
        conn.execute(calls.update().where(calls.c.id == "odd.3").values(started_at_ms=1))
    before = rows_by_table(database)
    assert delete(database, before_ms=now_ms() - 60_000) == {}
    assert rows_by_table(database) == before
    planned = plan(database, Selection(before_ms=now_ms() + 60_000))
    with database.write() as conn:
        running = conn.execute(sa.select(episodes.c.id).where(episodes.c.status == "running")).scalars().all()
        assert planned.left_out == {NOT_ENDED: len(running)}
        for name in running:
            append.end_episode(conn, name, by="api")
    before["events"] = rows_by_table(database)["events"]
    deleted = delete(database, before_ms=now_ms() + 60_000)
    after = rows_by_table(database)
    for table, rows in before.items():
        kept = [row for row in rows if table == "events" and "policy_version" in row]
        assert after[table] == (rows if table in OUTLIVE or table == "alembic_version" else kept), table
        if table not in OUTLIVE and rows:
            assert deleted[table] == len(rows) - len(kept), table
    found = verify(database)
    assert (found.faults, found.notes["manifest_episodes_deleted_since"]) == ([], 2)


@behaviour
def test_what_others_still_share_is_kept(database: Database) -> None:
    fill(database)
    names = ["a0", "a1", "b1", "odd"]

    def seen() -> Any:
        with database.read() as conn:
            skeletons = conn.execute(
                sa.select(calls.c.request_body).where(calls.c.episode_id.in_(names)).order_by(calls.c.id)
            )
            # As text: NaN, which a bad logprob may be, does not equal itself.
            loaded = {episode.id: repr(episode) for episode in read.load_episodes(conn, names)}
            return loaded, load_bodies(conn, skeletons.scalars())

    before = seen()
    deleted = delete(database, episode_ids=("b0",))
    assert (deleted["episodes"], deleted["calls"], deleted["choices"], deleted["rewards"]) == (1, 3, 3, 1)
    # Prompts of 500, 700 and 900 tokens: of their blocks the first is shared, 2 are full, 3 end a prompt.
    assert deleted["token_blocks"] == 5
    assert deleted["body_parts"] == 4  # what was said; the picture and the system prompt are others', too
    assert "groups" not in deleted  # b1 is in it
    assert seen() == before
    assert verify(database).faults == []
    with database.read() as conn, pytest.raises(UnknownEpisodeError):
        read.load_episodes(conn, ["b0"])
    assert delete(database, episode_ids=("b1",))["groups"] == 1
    with pytest.raises(UnknownEpisodeError, match="nothing was deleted"):
        delete(database, episode_ids=("a0", "b0"))
    names = ["a0", "a1", "odd"]
    assert seen()[0] == {name: before[0][name] for name in names}


@behaviour
def test_a_policy_s_old_versions_go_with_the_bin_s_calls_of_it(database: Database) -> None:
    for number, version in enumerate((0, 1, 2)):
        play(database, f"e{number}", "t", 1.0, version=version)
        write(database, intent(f"bin{version}", None, version=version), end(f"bin{version}"))
    play(database, "other", "t", 1.0, policy="writer", version=0)
    deleted = delete(database, policy="policy", before_version=2)
    assert (deleted["episodes"], deleted["calls"]) == (2, 2 * 3 + 2)
    with database.read() as conn:
        assert set(conn.execute(sa.select(episodes.c.id)).scalars()) == {"e2", "other"}
        bin_calls = conn.execute(sa.select(calls.c.id).where(calls.c.episode_id.is_(None))).scalars().all()
        assert bin_calls == ["bin2"]
    assert verify(database).faults == []


@behaviour
def test_what_is_under_way_is_left_out_and_counted(database: Database) -> None:
    fill(database)
    write(database, intent("a1.3", "a1"))  # the engine is at it
    with database.write() as conn:
        runs.create_run(conn, "next", "policy", {}, {})
        runs.add_manifest(conn, manifest("b", "next"))
    planned = plan(database, Selection(before_ms=now_ms() + 60_000))
    assert dict(planned.left_out) == {RUNNING: 2, PLANNED: 2}  # "odd" has an open call, too
    deleted = delete(database, before_ms=now_ms() + 60_000)
    assert deleted["episodes"] == 1
    with database.write() as conn:
        runs.end_run(conn, "next", "stopped")  # of an older version: nobody can go on with it
    assert delete(database, before_ms=now_ms() + 60_000)["episodes"] == 2
    assert verify(database).faults == []


def _interrupt(conn: sa.Connection, run: str, how: str) -> None:
    if how == "killed":
        conn.execute(runs_table.update().where(runs_table.c.id == run).values(seen_at_ms=1))
    else:
        runs.end_run(conn, run, how)


@behaviour
def test_the_step_that_a_run_was_interrupted_in_stays_until_another_run_begins(database: Database) -> None:
    for number, how in enumerate(("stopped", "failed", "killed")):
        policy, run, task = f"policy-{how}", f"run-{how}", "cde"[number]
        play(database, f"{task}0", f"task-{task}", 0.0, policy=policy)
        play(database, f"{task}1", f"task-{task}", 1.0, policy=policy)
        everything = {"policy": policy, "before_ms": now_ms() + 60_000}
        with database.write() as conn:
            runs.create_run(conn, run, policy, {}, {}, start_version=0)
            take(conn, run, Owner("token", "host", 1, "boot 1"), was=None, policy=policy)
            runs.add_manifest(conn, manifest(task, run))
        assert dict(plan(database, Selection(**everything)).left_out) == {PLANNED: 2}
        with database.write() as conn:
            _interrupt(conn, run, how)
        assert delete(database, **everything) == {}
        assert dict(plan(database, Selection(**everything)).left_out) == {RESUMABLE: 2}
        with database.read() as conn:
            step = runs.load_manifest(conn, run, 0)
            loaded = read.load_episodes(conn, {choice.episode_id for choice in step.choices})
        assert {call.id for episode in loaded for call in episode.calls} >= {c.call_id for c in step.choices}
        assert delete(database, episode_ids=(f"{task}0",))["episodes"] == 1, "named, it goes"
        with database.write() as conn:
            runs.create_run(conn, f"another-{how}", f"another-{policy}", {}, {}, start_version=0)
        assert delete(database, **everything) == {}, "of another policy"
        with database.write() as conn:
            runs.create_run(conn, f"{run}-next", policy, {}, {}, start_version=0)
        assert delete(database, **everything)["episodes"] == 1
    assert verify(database).faults == []


@behaviour
def test_a_run_that_is_trained_beside_a_newer_one_keeps_what_it_has_planned(database: Database) -> None:
    fill(database)
    with database.write() as conn:
        for run in ("one", "other"):
            runs.create_run(conn, run, "policy", {}, {}, start_version=0)
            take(conn, run, Owner("token", "host", 1, "boot 1"), was=None, policy=None)
        runs.add_manifest(conn, manifest("b", "one"))
    assert plan(database, Selection(before_ms=now_ms() + 60_000)).left_out[PLANNED] == 2


@behaviour
def test_one_prune_at_a_time(database: Database) -> None:
    with only_one(database), pytest.raises(UserError, match="another prune or import"), only_one(database):
        pass
    with only_one(database):
        pass


@behaviour
def test_a_writer_never_loses_what_it_refers_to(database: Database) -> None:
    """Writers that share prompts, messages, groups with what is being deleted all the time."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                failures.append(error)
                stop.set()

        return threading.Thread(target=run)

    def record(writer: int) -> None:
        for number in range(25):
            name = f"w{writer}-{number}"
            shared = messages(f"shared{number % 3}", 2)  # the same words in many episodes
            body = json.dumps({"messages": shared}).encode()
            with database.write() as conn:
                append.create_episode(conn, episode_id=name, task_id=f"t{number % 2}")
            for turn in range(2):
                write(
                    database,
                    intent(f"{name}.{turn}", name, body=body),
                    end(f"{name}.{turn}", [number % 3] * (300 + turn * 300)),
                )
            with database.write() as conn:
                append.end_episode(conn, name, by="api")

    def delete_all() -> None:
        while not stop.is_set():
            with database.read() as conn:
                ended = (
                    conn.execute(sa.select(episodes.c.id).where(episodes.c.status == "ended")).scalars().all()
                )
            if ended:
                prune(database, Selection(episode_ids=tuple(ended)))
            collect.collect_parts(database)
            collect.collect_blocks(database)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "SETTLED_MS", 0)
        writers = [guarded(lambda writer=writer: record(writer)) for writer in range(3)]
        deleting = guarded(delete_all)
        for thread in (*writers, deleting):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        deleting.join()
    assert failures == []
    found = verify(database)
    assert found.faults == []
    with database.read() as conn:
        left = conn.execute(sa.select(episodes.c.id)).scalars().all()
        assert len(read.load_episodes(conn, left)) == len(left)
        skeletons = conn.execute(sa.select(calls.c.request_body)).scalars().all()
        assert all(load_bodies(conn, skeletons))
    delete(database, before_ms=now_ms() + 60_000)
    with database.read() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(groups)).scalar() == 0
    assert verify(database).notes["orphaned_parts"] == 0
