"""What the store must do on every database: one list, run on SQLite and on Postgres."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from fakes.log_rows import choice, end, intent, reward

from lightning_rl.errors import UnknownEpisodeError, UserError
from lightning_rl.records import (
    CallDelivered,
    CallKind,
    CallStatus,
    EpisodeStatus,
    Fingerprint,
    LogEntry,
    ManifestChoice,
    PolicyVersion,
    ProbeSequence,
    Purpose,
    Quarantine,
    RewardTarget,
    StepManifest,
    VersionStatus,
    WeightsKind,
    logprobs,
    token_ids,
)
from lightning_rl.store import append, curation, doctor, episode_view, listing, policies, read, runs, upgrade
from lightning_rl.store.blocks import load_prompts, store_prompt
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.schema import calls, episodes, events, groups, metadata, token_blocks

BEHAVIOURS: list[Callable[[Database], None]] = []


def behaviour(function: Callable[[Database], None]) -> Callable[[Database], None]:
    BEHAVIOURS.append(function)
    return function


def write(database: Database, *entries: LogEntry) -> None:
    with database.write() as conn:
        append.append_entries(conn, entries)


def rows_by_table(database: Database) -> dict[str, list[tuple[object, ...]]]:
    with database.read() as conn:
        return {
            table.name: sorted((tuple(row) for row in conn.execute(sa.select(table))), key=repr)
            for table in metadata.sorted_tables
        }


def event_kinds(database: Database, subject: str, subject_id: str) -> list[str]:
    with database.read() as conn:
        query = sa.select(events.c.kind).where(events.c.subject == subject, events.c.subject_id == subject_id)
        return list(conn.execute(query.order_by(events.c.created_at_ms, events.c.id)).scalars())


@behaviour
def test_another_vendor_s_counts_and_whether_they_are_estimates(database: Database) -> None:
    told = {"reported_prompt_tokens": 11, "reported_completion_tokens": 4}
    write(database, intent("c1"), intent("c2"), end("c1", None, usage_estimated=True, **told), end("c2"))
    columns = (calls.c.num_prompt_tokens, calls.c.reported_completion_tokens, calls.c.usage_estimated)
    with database.read() as conn:
        rows = conn.execute(sa.select(*columns).order_by(calls.c.id)).all()
    assert [tuple(row) for row in rows] == [(11, 4, True), (3, None, None)]


@behaviour
def test_a_batch_comes_back_as_it_went_in(database: Database) -> None:
    prompt = [i * 97 % 151_000 for i in range(1000)]
    write(
        database,
        intent("c1", task="sum-1", batch="b", agent="planner", tags={"split": "train"}),
        intent("c2", agent="writer", body=b'{"odd":  [1, 2.50] }'),
        end("c1", prompt, choice([5, 150_999], [-0.1, -1e-8]), choice([6], [-3.5], index=1)),
        CallDelivered("c1", True),
    )
    with database.read() as conn:
        (episode,) = read.load_episodes(conn, ["ep"])
        skeletons = conn.execute(sa.select(calls.c.request_body).order_by(calls.c.id)).scalars().all()
        assert load_bodies(conn, skeletons) == [intent("c1").request_body, b'{"odd":  [1, 2.50] }']
    first, second = episode.calls
    assert (episode.task_id, episode.tags, episode.status) == (
        "sum-1",
        {"split": "train"},
        EpisodeStatus.RUNNING,
    )
    assert episode.group_id == read.group_id("sum-1", "b")
    assert [(call.id, call.ordinal, call.agent) for call in episode.calls] == [
        ("c1", 0, "planner"),
        ("c2", 1, "writer"),
    ]
    assert first.prompt_ids == token_ids(prompt)
    assert (first.status, first.delivered, second.status, second.delivered) == (
        CallStatus.COMPLETE,
        True,
        CallStatus.OPEN,
        None,
    )
    assert [one.completion_ids.tolist() for one in first.choices] == [[5, 150_999], [6]]
    assert first.choices[0].behavior_logprobs == logprobs([-0.1, -1e-8])


@behaviour
def test_floats_and_ids_keep_every_bit(database: Database) -> None:
    patterns = [0x00000001, 0x7F7FFFFF, 0x80000000, 0xBDCCCCCD, 0x7F800000, 0xFFC00001]
    values = logprobs()
    values.frombytes(struct.pack(f"={len(patterns)}I", *patterns))
    ids = [0, 1, 65_535, 65_536, 2**31, 2**32 - 1]
    write(database, intent("c1"), end("c1", ids, replace(choice(ids), behavior_logprobs=values)))
    with database.read() as conn:
        (call,) = read.load_episodes(conn, ["ep"])[0].calls
    assert call.prompt_ids.tolist() == ids
    assert call.choices[0].completion_ids.tolist() == ids
    assert call.choices[0].behavior_logprobs.tobytes() == values.tobytes()


@behaviour
def test_absent_tokens_are_empty_and_quarantined_as_said(database: Database) -> None:
    bare = choice(
        completion_ids=None, behavior_logprobs=None, quarantine=Quarantine.NO_COMPLETION_IDS, message=None
    )
    write(
        database, intent("c1"), end("c1", None, bare, status=CallStatus.ERROR, http_status=500, error="boom")
    )
    with database.read() as conn:
        (call,) = read.load_episodes(conn, ["ep"])[0].calls
    assert (len(call.prompt_ids), len(call.choices[0].completion_ids)) == (0, 0)
    assert call.choices[0].quarantine is Quarantine.NO_COMPLETION_IDS


@behaviour
def test_a_batch_that_is_retried_doubles_nothing(database: Database) -> None:
    batch: list[LogEntry] = [
        intent("c1", task="t"),
        intent("c2", None),
        end("c1"),
        CallDelivered("c1", True),
        end("lost"),
    ]
    write(database, *batch)
    before = rows_by_table(database)
    write(database, *batch)
    write(database, *batch[2:])
    write(database, end("c1", [9, 9], choice(), choice(index=1), status=CallStatus.ERROR))
    assert rows_by_table(database) == before
    write(database, intent("c3"))
    with database.read() as conn:
        assert [call.ordinal for call in read.load_episodes(conn, ["ep"])[0].calls] == [0, 1]


@behaviour
def test_an_end_without_its_intent_is_kept_and_completed_later(database: Database) -> None:
    own = choice(index=2, quarantine=Quarantine.UNRECORDABLE)  # a reason that no intent takes away
    write(database, end("c1", [4, 5], choice(), choice(index=1, quarantine=Quarantine.PENALTIES), own))
    with database.read() as conn:
        call = read.calls_by_upstream_ids(conn, ["chatcmpl-c1"])["chatcmpl-c1"]
    assert (call.episode_id, call.ordinal, call.prompt_ids.tolist()) == ("", -1, [4, 5])
    unrecordable, penalties = Quarantine.UNRECORDABLE, Quarantine.PENALTIES
    assert [one.quarantine for one in call.choices] == [unrecordable, penalties, unrecordable]
    assert event_kinds(database, "call", "c1") == ["missing_intent"]

    write(database, CallDelivered("c2", True), intent("c1"))
    with database.read() as conn:
        (call,) = read.load_episodes(conn, ["ep"])[0].calls
        stub = conn.execute(sa.select(calls.c.delivered).where(calls.c.id == "c2")).scalar_one()
    assert (call.ordinal, call.status, call.policy) == (0, CallStatus.COMPLETE, "policy")
    assert [one.quarantine for one in call.choices] == [None, penalties, unrecordable]
    assert stub is True


@behaviour
def test_a_late_call_is_recorded_and_the_episode_stays_ended(database: Database) -> None:
    write(database, intent("c1"))
    with database.write() as conn:
        append.end_episode(conn, "ep", by="api")
    write(database, intent("c2"))
    with database.read() as conn:
        (episode,) = read.load_episodes(conn, ["ep"])
    assert (episode.status, len(episode.calls)) == (EpisodeStatus.ENDED, 2)
    assert event_kinds(database, "episode", "ep") == ["ended", "late_call"]


@behaviour
def test_later_calls_fill_in_and_contradictions_stay_with_the_call(database: Database) -> None:
    write(database, intent("c1", policy=None, version=None))
    write(database, intent("c2", task="a", tags={"x": "1"}, version=3), intent("c3", task="a", batch="b"))
    write(
        database,
        intent("c4", task="other", tags={"x": "2", "y": "3"}),
        intent("c5", batch="z", conflict="body names 'e9'"),
    )
    with database.read() as conn:
        (episode,) = read.load_episodes(conn, ["ep"])
        said = conn.execute(sa.select(calls.c.attribution_conflict).order_by(calls.c.id)).scalars().all()
        pinned = conn.execute(sa.select(episodes.c.policy, episodes.c.policy_version)).one()
        tags = conn.execute(sa.select(calls.c.tags).where(calls.c.id == "c4")).scalar_one()
    assert (episode.task_id, episode.group_id) == ("a", read.group_id("a", "b"))
    assert (episode.tags, tags) == ({"x": "1", "y": "3"}, {"x": "2", "y": "3"})
    assert tuple(pinned) == ("policy", 3)
    assert said == [
        None,
        None,
        None,
        "task 'other', but the episode's task is 'a'",
        "body names 'e9'; batch 'z', but the episode's batch is 'b'",
    ]


@behaviour
def test_strings_that_a_database_refuses_are_stored_with_a_replacement(database: Database) -> None:
    odd = "a\x00b\ud800"
    write(
        database,
        intent("c1", odd, task=odd, agent=odd, tags={odd: odd}, sampling={"stop": [odd], "x": float("nan")}),
        end("c1", [1], choice(stop_reason=odd, message={"content": odd}), error=odd),
        intent("c2", "e2", retry_count=2**40, fingerprint_id="nobody knows it"),
    )
    with database.write() as conn:
        append.end_episode(conn, odd, by="api", note=odd)
        append.add_reward(conn, reward(odd, source=odd, note=odd))
        (episode,) = read.load_episodes(conn, ["a\ufffdb?"])
    assert episode.calls[0].sampling == {"stop": ["a\ufffdb?"], "x": "nan"}
    assert event_kinds(database, "call", "c2") == ["unknown_fingerprint"]


def _noise(num_chars: int) -> str:
    """What compression does not shorten."""
    return random.Random(num_chars).randbytes(num_chars // 2).hex()


@behaviour
def test_texts_of_any_length_do_not_stop_the_writer(database: Database) -> None:
    key = _noise(9000)
    write(database, intent("c1", idempotency_key=key), end("c1", upstream_id=_noise(8000)))
    write(database, intent("c2", idempotency_key=key), intent("c3", idempotency_key=f"{key}!"))
    with database.read() as conn:
        found = dict(tuple(row) for row in conn.execute(sa.select(calls.c.id, calls.c.retry_of)))
    assert found == {"c1": None, "c2": "c1", "c3": None}


@behaviour
def test_a_value_that_no_database_holds_is_a_mistake_and_no_fault_of_the_database(database: Database) -> None:
    write(database, intent("c1"))
    with pytest.raises(UserError, match="can't hold"), database.write() as conn:
        append.create_episode(conn, episode_id="e", task_id="t", expected_size=2**70)
    with database.read() as conn:
        for odd in ("a\x00", "a\ud800"):
            with pytest.raises(UnknownEpisodeError):
                listing.list_episodes(conn, listing.EpisodeFilter(), after=odd)
            assert listing.list_unattributed(conn, after=odd).rows == ()
    if database.engine.dialect.name == "postgresql":  # a limit of its indexes
        with pytest.raises(UserError, match="can't hold"), database.write() as conn:
            append.create_episode(conn, episode_id=_noise(6000))


@behaviour
def test_create_episode_fills_in_repeats_and_refuses_contradictions(database: Database) -> None:
    write(database, intent("c1"))
    with database.write() as conn:
        for _ in range(2):
            append.create_episode(
                conn,
                episode_id="ep",
                task_id="t",
                batch="b",
                expected_size=4,
                purpose=Purpose.EVAL,
                tags={"k": "v"},
            )
    assert event_kinds(database, "episode", "ep") == ["created"]
    with database.read() as conn:
        (group,) = read.load_groups(conn, [read.group_id("t", "b")])
        assert conn.execute(sa.select(sa.func.count()).select_from(groups)).scalar() == 1
    assert (group.task_id, group.batch, group.expected_size) == ("t", "b", 4)
    assert (group.episodes[0].purpose, group.episodes[0].tags) == (Purpose.EVAL, {"k": "v"})
    for wrong in (
        {"task_id": "u"},
        {"batch": "c"},
        {"expected_size": 5, "task_id": "t"},
        {"purpose": Purpose.TRAIN},
        {"tags": {"k": "w"}},
        {"policy_version": 1},
    ):
        before = rows_by_table(database)
        with pytest.raises(UserError), database.write() as conn:
            append.create_episode(conn, **{"episode_id": "ep", "purpose": Purpose.EVAL, **wrong})
        assert rows_by_table(database) == before
    with pytest.raises(UserError, match="needs a task"), database.write() as conn:
        append.create_episode(conn, episode_id="new", expected_size=2)
    with database.write() as conn:
        append.create_episode(conn, episode_id="ep", task_id="t", purpose=Purpose.EVAL)
    with database.read() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(groups)).scalar() == 1


@behaviour
def test_failed_and_excluded_are_not_taken_back_by_an_end(database: Database) -> None:
    write(database, intent("c1"))
    with database.write() as conn:
        append.end_episode(conn, "ep", status=EpisodeStatus.FAILED, by="runner", note="crashed")
        append.end_episode(conn, "ep", by="api")
        append.add_reward(conn, reward(final=True))
        (episode,) = read.load_episodes(conn, ["ep"])
        assert (episode.status, len(episode.rewards)) == (EpisodeStatus.FAILED, 1)
        append.end_episode(conn, "ep", status=EpisodeStatus.EXCLUDED, by="person")
        (excluded,) = read.load_episodes(conn, ["ep"])
    assert (excluded.status, excluded.ended_at_ms) == (EpisodeStatus.EXCLUDED, episode.ended_at_ms)
    assert event_kinds(database, "episode", "ep") == ["failed", "excluded"]
    with pytest.raises(UnknownEpisodeError), database.write() as conn:
        append.end_episode(conn, "nobody", by="api")


@behaviour
def test_rewards_are_appended_checked_and_final_ones_end_the_episode(database: Database) -> None:
    write(database, intent("c1", agent="planner"), end("c1"), intent("c2", "other"))
    first = reward(value=0.1, note="meh")
    second = reward(value=1 / 3, supersedes=first.id, final=True)
    with database.write() as conn:
        for row in (first, first, second):
            append.add_reward(conn, row)
        append.add_reward(conn, reward(target=RewardTarget.AGENT, agent="planner"))
        append.add_reward(conn, reward(target=RewardTarget.CALL, call_id="c1"))
        tokens = reward(target=RewardTarget.TOKENS, call_id="c1", choice_index=0, token_start=1, token_end=2)
        append.add_reward(conn, tokens)
        (episode,) = read.load_episodes(conn, ["ep"])
    assert episode.status is EpisodeStatus.ENDED
    assert len(episode.rewards) == 5
    assert {first, second, tokens} <= set(episode.rewards)
    for wrong, words in (
        (reward("nobody"), "no episode 'nobody'"),
        (reward(value=float("nan")), "finite"),
        (reward(value=float("-inf")), "finite"),
        (reward(supersedes="x"), "no reward 'x'"),
        (reward(supersedes=tokens.id), "is about call c1 choice 0 tokens 1-2, and one about episode can't"),
        (replace(tokens, id="t3", token_start=0, supersedes=tokens.id), "the same thing"),
        (reward(target=RewardTarget.CALL, call_id="c1", supersedes=second.id), "is about episode, and one"),
        (reward(target=RewardTarget.AGENT, agent="writer"), "'writer'"),
        (reward(target=RewardTarget.AGENT), "which agent"),
        (reward(target=RewardTarget.CALL, call_id="c2"), "no call 'c2'"),
        (reward(target=RewardTarget.CALL, call_id="c1", choice_index=1), "no choice 1"),
        (replace(tokens, id="t2", token_end=3), "not a range"),
        (reward(call_id="c1"), "can't name a call"),
    ):
        with pytest.raises(UserError, match=words), database.write() as conn:
            append.add_reward(conn, wrong)
    with database.read() as conn:
        assert len(read.load_episodes(conn, ["ep"])[0].rewards) == 5


@behaviour
def test_shared_prefixes_are_stored_once_and_read_exactly(database: Database) -> None:
    turns = [token_ids([i % 50_000 for i in range(length)]) for length in (256, 700, 1500, 16_384)]
    with database.write() as conn:
        names = [store_prompt(conn, turn) for turn in turns]
        assert store_prompt(conn, token_ids()) is None
        assert store_prompt(conn, turns[1]) == names[1]
        count = conn.execute(sa.select(sa.func.count()).select_from(token_blocks)).scalar_one()
    # 64 full blocks of the longest; 700 = 2 * 256 + 188 and 1500 = 5 * 256 + 220 end in one of their own.
    assert count == 64 + 2
    with database.read() as conn:
        assert load_prompts(conn, [name for name in names if name]) == dict(zip(names, turns, strict=True))


@behaviour
def test_many_writers_on_shared_episodes_lose_and_double_nothing(database: Database) -> None:
    num_writers, num_batches = 6, 8
    failures: list[BaseException] = []

    def work(writer: int) -> None:
        try:
            for number in range(num_batches):
                names = [f"w{writer}-{number}-{i}" for i in range(4)]
                # Opposite orders of the same episodes, tasks, bodies and prompts: what deadlocks are made of.
                shared = [f"e{(i if writer % 2 else -i) % 4}" for i in range(4)]
                body = [b'{"messages": ["%s"]}' % (bytes([65 + (i + writer) % 4]) * 200) for i in range(4)]
                write(
                    database,
                    *(
                        intent(n, e, task=f"t{e}", body=b)
                        for n, e, b in zip(names, shared, body, strict=True)
                    ),
                    *(end(n, [number % 3] * 300) for n in names),
                )
                with database.write() as conn:
                    append.add_reward(conn, reward(shared[0], source=f"w{writer}"))
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with database.read() as conn:
        loaded = read.load_episodes(conn, [f"e{i}" for i in range(4)])
    for episode in loaded:
        assert [call.ordinal for call in episode.calls] == list(range(num_writers * num_batches))
        assert len({call.id for call in episode.calls}) == num_writers * num_batches
    assert sum(len(episode.rewards) for episode in loaded) == num_writers * num_batches


@behaviour
def test_writers_that_begin_one_group_at_the_same_moment_agree(database: Database) -> None:
    num_writers, num_tasks = 6, 25
    together = threading.Barrier(num_writers)
    failures: list[BaseException] = []

    def work(writer: int) -> None:
        for task in range(num_tasks):
            together.wait()
            try:
                write(database, intent(f"c{writer}.{task}", f"e{writer}.{task}", task=f"t{task}"))
            except Exception as error:  # noqa: BLE001 - a thread's errors are the test's
                failures.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(rows_by_table(database)["groups"]) == num_tasks


def _ready_group(database: Database, task: str, count: int = 2) -> str:
    for index in range(count):
        name = f"{task}-{index}"
        write(database, intent(f"call-{name}", name, task=task), end(f"call-{name}"))
        with database.write() as conn:
            append.add_reward(conn, reward(name, float(index), final=True))
    return read.group_id(task, "")


def _ready(database: Database, policy: str = "policy", run_id: str = "run") -> tuple[list[str], str]:
    with database.read() as conn:
        counted = read.count_groups(conn, policy=policy, run_id=run_id)
        return read.trainable_group_ids(conn, policy=policy, run_id=run_id), counted.explain()


@behaviour
def test_groups_are_ready_when_nothing_of_them_is_outstanding(database: Database) -> None:
    assert _ready(database) == ([], "0 groups")
    first, second = _ready_group(database, "t1"), _ready_group(database, "t2")
    assert _ready(database) == ([first, second], "2 groups: 2 ready")
    with database.read() as conn:
        assert read.trainable_group_ids(conn, policy="policy", run_id="run", limit=1) == [first]

    write(database, intent("r", "t2-running", task="t2"))
    assert _ready(database) == ([first], "2 groups: 1 ready, 1 with an episode still running")
    with database.write() as conn:
        append.end_episode(conn, "t2-running", status=EpisodeStatus.FAILED, by="runner")
    assert _ready(database)[0] == [first, second]

    with database.write() as conn:  # an evaluation of the same task neither delays nor counts
        append.create_episode(conn, episode_id="eval", task_id="t1", purpose=Purpose.EVAL, expected_size=3)
    assert _ready(database) == ([second], "2 groups: 1 ready, 1 with fewer episodes than expected")
    with database.write() as conn:
        append.create_episode(conn, episode_id="t1-2", task_id="t1")
        append.end_episode(conn, "t1-2", status=EpisodeStatus.EXCLUDED, by="person")
    assert _ready(database)[0] == [first, second]
    assert _ready(database, policy="writer") == ([], "2 groups: 2 without an ended episode of this policy")


@behaviour
def test_groups_that_can_never_be_trained_are_not_offered(database: Database) -> None:
    for name, task in (("gap", "t1"), ("silent", "t2"), ("lonely", None), ("failed", "t3")):
        write(database, intent(f"c-{name}", name, task=task), end(f"c-{name}"))
    with database.write() as conn:
        append.mark_gap(conn, "gap", source="recorder", note="disk full")
        append.mark_gap(conn, "gap-only", source="recorder")
        append.end_episode(conn, "silent", by="api")
        append.end_episode(conn, "failed", status=EpisodeStatus.FAILED, by="api")
        append.create_episode(conn, episode_id="eval", task_id="t4", purpose=Purpose.EVAL)
        for name in ("gap", "lonely", "failed", "eval"):
            append.add_reward(conn, reward(name, final=True))
    assert _ready(database) == (
        [],
        "3 groups: 2 without an ended episode of this policy, 1 without any reward",
    )
    with database.read() as conn:
        counts = read.count_episodes(conn)
    assert (counts.total, counts.evaluation, counts.running, counts.failed, counts.ended) == (6, 1, 1, 1, 3)
    assert counts.explain() == (
        "6 episodes: 1 for evaluation, 1 running, 1 failed, 3 ended "
        "(1 without a reward, 1 without a task, 1 with a gap)"
    )


@behaviour
def test_a_run_trains_a_group_once_and_its_manifest_comes_back(database: Database) -> None:
    group = _ready_group(database, "t1")
    manifest = StepManifest(
        run_id="run",
        step=0,
        policy="policy",
        from_version=0,
        choices=(
            ManifestChoice("call-t1-0", 0, "t1-0", group, None, -1 / 3, 0.25, None),
            ManifestChoice("call-t1-1", 0, "t1-1", group, "a", None, 0.0, "side call"),
        ),
        reward_ids={"t1-0": ("r1", "r2"), "t1-1": ("r3",)},
        returns={"t1-0": 0.1, "t1-1": 1.0},
    )
    with database.write() as conn:
        runs.create_run(conn, "run", "policy", {"seed": 0}, {"torch": "2"})
        runs.add_manifest(conn, manifest)
        runs.finish_step(conn, "run", 0, to_version=1, metrics={"reward": 0.5, "gap": float("inf")})
        runs.end_run(conn, "run", "finished")
    with database.read() as conn:
        assert runs.load_manifest(conn, "run", 0) == manifest
        with pytest.raises(UserError, match="no manifest"):
            runs.load_manifest(conn, "run", 1)
    assert _ready(database) == ([], "1 group: 1 trained already")
    assert _ready(database, run_id="another")[0] == [group]
    for wrong in (
        lambda conn: runs.create_run(conn, "run", "policy", {}, {}),
        lambda conn: runs.end_run(conn, "no", "failed"),
        lambda conn: runs.finish_step(conn, "run", 7, to_version=None, metrics={}),
    ):
        with pytest.raises(UserError), database.write() as conn:
            wrong(conn)


@behaviour
def test_what_made_a_version_is_trained_again_only_on_purpose(database: Database) -> None:
    group = _ready_group(database, "t1")
    row = ManifestChoice("call-t1-0", 0, "t1-0", group, None, 1.0, 1.0, None)
    with database.write() as conn:
        runs.create_run(conn, "run", "policy", {}, {})
        runs.add_manifest(conn, StepManifest("run", 1, "policy", 0, (row,), {"t1-0": ("r",)}, {"t1-0": 1.0}))
        policies.add_candidate(conn, _version(1))  # of run "run", step 1
    assert _ready(database, run_id="next") == ([], "1 group: 1 trained already")
    with database.read() as conn:
        assert read.trainable_group_ids(conn, policy="policy", run_id="next", again=True) == [group]
        assert read.trainable_group_ids(conn, policy="policy", run_id="run", again=True) == []
        assert read.count_groups(conn, policy="policy", run_id="next", again=True).ready == 1
    with database.write() as conn:
        policies.set_version_status(conn, "policy", 1, VersionStatus.REJECTED, source="publisher")
    assert _ready(database, run_id="next")[0] == [group], "a rejected version has taught nobody"


def _version(number: int, status: VersionStatus = VersionStatus.CANDIDATE) -> PolicyVersion:
    probe = ProbeSequence(token_ids([1, 2, 3]), logprobs([-0.1, -0.2]), logprobs([-0.3, -1e-7]))
    kind, path = WeightsKind.LORA, f"/v/{number}"
    return PolicyVersion(
        "policy", number, status, kind, path, "sha256:0", (probe,), "base", "run", number, 1, {"ok": True}
    )


@behaviour
def test_policy_versions_move_on_one_live_at_a_time(database: Database) -> None:
    with database.write() as conn:
        assert (policies.next_version(conn, "policy"), policies.live_version(conn, "policy")) == (1, None)
        base = PolicyVersion(
            "policy", 0, VersionStatus.LIVE, WeightsKind.FULL, None, None, (), "base", None, None, 1
        )
        policies.add_candidate(conn, base)
        policies.add_candidate(conn, _version(1))
        assert policies.next_version(conn, "policy") == 2
        assert policies.load_version(conn, "policy", 1) == _version(1)
        policies.set_version_status(
            conn, "policy", 1, VersionStatus.LIVE, verdict={"moved": 0.5}, source="publisher"
        )
    with database.read() as conn:
        live = policies.live_version(conn, "policy")
        assert live is not None
        assert (live.version, live.verdict) == (1, {"moved": 0.5})
        assert [v.status for v in policies.versions(conn, "policy")] == [
            VersionStatus.DRAINING,
            VersionStatus.LIVE,
        ]
        draining = policies.versions_with_status(conn, VersionStatus.DRAINING, VersionStatus.RETIRED)
        assert [version.version for version in draining] == [0]
        assert policies.policy_names(conn) == ["policy"]
    assert event_kinds(database, "policy_version", "policy/0") == ["live", "draining"]
    for wrong in (
        lambda conn: policies.add_candidate(conn, _version(1)),
        lambda conn: policies.set_version_status(conn, "policy", 9, VersionStatus.LIVE, source="x"),
    ):
        with pytest.raises(UserError), database.write() as conn:
            wrong(conn)


@behaviour
def test_fingerprints_are_stored_once(database: Database) -> None:
    fingerprint = Fingerprint("f1", "vllm 0.32.0", "base", "aa", None, 2048, "raw_logprobs")
    with database.write() as conn:
        append.add_fingerprint(conn, fingerprint)
        append.add_fingerprint(conn, fingerprint)
    write(database, intent("c1", fingerprint_id="f1"))
    with database.read() as conn:
        assert read.load_episodes(conn, ["ep"])[0].calls[0].fingerprint_id == "f1"


@behaviour
def test_a_failed_transaction_leaves_nothing_and_the_next_one_works(database: Database) -> None:
    before = rows_by_table(database)

    def interrupted(conn: sa.Connection) -> None:
        append.append_entries(conn, [intent("c1", task="t"), end("c1")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), database.write() as conn:
        interrupted(conn)
    assert rows_by_table(database) == before
    write(database, intent("c1"))
    with pytest.raises(UnknownEpisodeError), database.read() as conn:
        read.load_episodes(conn, ["ep", "nobody"])


@behaviour
def test_an_upgrade_from_the_first_schema_keeps_every_row(database: Database) -> None:
    from alembic import command

    write(database, intent("c1", task="t", agent="a"), end("c1"), intent("u", None), end("u"))
    before = rows_by_table(database)
    with database.write() as conn:
        command.downgrade(upgrade.alembic_config(conn), "0001")
        indexes = {index["name"] for index in sa.inspect(conn).get_indexes("choices")}
        assert indexes == {"ix_choices_quarantine"}
    Database.open(database.url).close()
    assert rows_by_table(database) == before


@behaviour
def test_pages_of_episodes_and_of_unattributed_calls(database: Database) -> None:
    for number in range(5):
        write(
            database,
            intent(f"c{number}", f"e{number % 5}", agent=f"a{number % 2}", started_at_ms=number // 2),
        )
    write(database, intent("u1", None), intent("u2", None), intent("u3", None))
    with database.write() as conn:
        append.create_episode(conn, episode_id="e1", tags={"k": "v"})
        append.add_reward(conn, reward("e1", 0.5))
        append.mark_gap(conn, "e2", source="test")
    with database.read() as conn:
        first = listing.list_episodes(conn, listing.EpisodeFilter(), limit=3)
        rest = listing.list_episodes(conn, listing.EpisodeFilter(), limit=3, after=first.next)
        assert [row.id for row in (*first.rows, *rest.rows)] == ["e4", "e3", "e2", "e1", "e0"]
        assert (first.next, rest.next) == ("e2", None)

        def found(**wanted: Any) -> list[str]:
            return [row.id for row in listing.list_episodes(conn, listing.EpisodeFilter(**wanted)).rows]

        assert found(agent="a1") == ["e3", "e1"]
        assert found(tags={"k": "v"}) == ["e1"]
        assert found(tags={"k": "other"}) == []
        assert found(unrewarded=True, with_gap=True) == ["e2"]
        assert found(since_ms=1, until_ms=2) == ["e3", "e2"]
        calls_page = listing.list_unattributed(conn, limit=2)
        assert [row.id for row in calls_page.rows] == ["u3", "u2"]
        assert [row.id for row in listing.list_unattributed(conn, after=calls_page.next).rows] == ["u1"]
        view = episode_view.load_view(conn, "e1")
        assert (view.line.reward, [call.agent for call in view.calls]) == (0.5, ["a1"])


@behaviour
def test_second_thoughts_about_an_episode_are_events_and_the_columns_follow(database: Database) -> None:
    write(database, intent("c1", tags={"k": "1"}))
    with database.write() as conn:
        with pytest.raises(UserError, match="is running"):
            curation.include_episode(conn, "ep", by="cli")
        append.end_episode(conn, "ep", status=EpisodeStatus.EXCLUDED, by="cli", note="leaked the answer")
        for _ in range(2):
            curation.include_episode(conn, "ep", by="cli", note="it had not")
            curation.tag_episode(conn, "ep", {"k": "2", "new": "x"}, by="cli")
            curation.untag_episode(conn, "ep", ["new", "nothing"], by="cli")
            (episode,) = read.load_episodes(conn, ["ep"])
            assert (episode.status, episode.tags) == (EpisodeStatus.ENDED, {"k": "2"})
    said: dict[str, list[Any]] = {}
    for event in _view(database, "ep").events:
        said.setdefault(event.kind, []).append((event.value, event.note))
    assert said.pop("excluded") == [(None, "leaked the answer")]
    assert said.pop("ended") == [({"was": "excluded"}, "it had not")]
    assert {"was": {"k": "1"}, "tags": {"k": "2", "new": "x"}} in [value for value, _ in said.pop("tagged")]
    assert said.pop("untagged") == 2 * [({"was": {"new": "x"}}, None)]
    assert said == {}
    with pytest.raises(UnknownEpisodeError), database.write() as conn:
        curation.tag_episode(conn, "nobody", {"a": "b"}, by="cli")


def _view(database: Database, name: str) -> episode_view.EpisodeView:
    with database.read() as conn:
        return episode_view.load_view(conn, name)


@behaviour
def test_unattributed_calls_are_assigned_after_the_others_by_time(database: Database) -> None:
    write(database, intent("c1"), end("c1"))
    for name, at in (("u2", 20), ("u1", 10), ("u3", 30)):
        write(database, intent(name, None, started_at_ms=at), end(name, [4, 5]))
    with database.write() as conn:
        assert curation.assign_calls(conn, "ep", ["u2", "u1", "u2"], agent="writer", by="cli") == [1, 2]
        assert curation.assign_calls(conn, "new", ["u3"], create=True, by="cli") == [0]
        ep, new = read.load_episodes(conn, ["ep", "new"])
    assert [(call.id, call.agent) for call in ep.calls] == [("c1", None), ("u1", "writer"), ("u2", "writer")]
    assert [(call.id, call.prompt_ids.tolist()) for call in new.calls] == [("u3", [4, 5])]
    view = _view(database, "ep")
    assert [call.attribution_rule for call in view.calls] == ["header", "assigned", "assigned"]
    assert sorted(event.kind for event in view.events) == ["assigned", "assigned"]
    write(database, intent("c2"))
    assert [call.id for call in _view(database, "ep").calls] == ["c1", "u1", "u2", "c2"]

    write(database, intent("u4", None))
    _train(database, "new")
    for episode, names, words in (
        ("ep", ["u1"], "'u1' is in episode 'ep' already"),
        ("ep", ["u4", "c9"], "no call 'c9'"),
        ("ep", [], "no call was named"),
        ("new", ["u4"], "was trained by run run"),
    ):
        before = rows_by_table(database)
        with pytest.raises(UserError, match=words), database.write() as conn:
            curation.assign_calls(conn, episode, names, by="cli")
        assert rows_by_table(database) == before
    with pytest.raises(UnknownEpisodeError), database.write() as conn:
        curation.assign_calls(conn, "nobody", ["u4"], by="cli")


def _train(database: Database, episode: str) -> None:
    row = ManifestChoice("u3", 0, episode, None, None, 1.0, 1.0, None)
    with database.write() as conn:
        runs.create_run(conn, "run", "policy", {}, {})
        runs.add_manifest(conn, StepManifest("run", 0, "policy", 0, (row,), {}, {}))


@behaviour
def test_kinds_and_used_answers_can_be_said_afterwards(database: Database) -> None:
    write(database, intent("c1", agent="title"), end("c1", [1], choice(), choice(index=1)), intent("c2"))
    with database.write() as conn:
        assert curation.calls_of_agent(conn, "ep", "title") == ["c1"]
        assert curation.set_call_kind(conn, ["c1", "c2"], CallKind.SIDE, by="cli", note="titles") == 2
        assert curation.set_call_kind(conn, ["c1", "c2"], CallKind.SIDE, by="cli") == 0
        assert curation.set_call_kind(conn, ["c2"], CallKind.POLICY, by="cli") == 1
        curation.set_choice_used(conn, "c1", 1, True, by="cli")
        curation.set_choice_used(conn, "c1", 1, True, by="cli")
        (episode,) = read.load_episodes(conn, ["ep"])
    assert [call.kind for call in episode.calls] == [CallKind.SIDE, CallKind.POLICY]
    assert [choice.used for choice in episode.calls[0].choices] == [None, True]
    assert event_kinds(database, "call", "c2") == ["kind", "kind"]
    assert event_kinds(database, "choice", "c1/1") == ["used"]
    for wrong in (
        lambda conn: curation.set_call_kind(conn, ["c1", "nobody"], CallKind.JUDGE, by="cli"),
        lambda conn: curation.set_choice_used(conn, "c1", 2, True, by="cli"),
    ):
        with pytest.raises(UserError), database.write() as conn:
            wrong(conn)


@behaviour
def test_idle_episodes_end_unless_an_answer_is_under_way(database: Database) -> None:
    now, minute = 10_000_000, 60_000
    for name, started, ended in (
        ("quiet", now - 10 * minute, now - 9 * minute),
        ("busy", now - 10 * minute, now - minute),
        ("waits", now - 10 * minute, None),
        ("died", now - 120 * minute, None),
    ):
        write(database, intent(f"c-{name}", name, started_at_ms=started))
        if ended is not None:
            write(database, end(f"c-{name}", ended_at_ms=ended))
    with database.write() as conn:
        append.create_episode(conn, episode_id="announced")
        wanted = {"idle_ms": 5 * minute, "at_ms": now}
        assert curation.idle_episodes(conn, **wanted) == ["died", "quiet"]
        assert curation.end_if_idle(conn, "quiet", **wanted)
        assert not curation.end_if_idle(conn, "quiet", **wanted), "another proxy was quicker"
        assert not curation.end_if_idle(conn, "busy", **wanted), "a call has come meanwhile"
        assert curation.idle_episodes(conn, **wanted) == ["died"]
    line = _view(database, "quiet").line
    assert (line.status, line.ended_by) == ("ended", "idle")


@behaviour
def test_a_checkup_counts_the_same_everywhere(database: Database) -> None:
    greedy = choice(quarantine=Quarantine.TEMPERATURE_ZERO)
    write(
        database,
        intent("c1", task="t"),
        end("c1", [1], choice([7, 8])),
        intent("c2"),
        end("c2", [1, 7, 8, 2], greedy),
        intent("c3", kind=CallKind.SIDE, conflict="odd"),
        end("c3", [5]),
        intent("u1", None),
    )
    with database.write() as conn:
        append.add_reward(conn, reward(value=0.5, final=True))
        append.mark_gap(conn, "gone", source="test")
    write(database, intent("c4"), end("c4", None, status=CallStatus.ERROR))
    with database.read() as conn:
        found = doctor.check_up(conn)
    counts = found.counts
    assert (counts.calls, counts.attributed, counts.complete) == (5, 4, 3)
    assert (counts.answers, counts.exact, counts.trainable) == (4, 4, 2)
    assert {(exclusion.reason, exclusion.count, exclusion.example) for exclusion in found.exclusions} == {
        ("temperature_zero", 1, "c2"),
        ("side_call", 1, "c3"),
        ("attribution_conflict", 1, "c3"),
        ("unattributed", 1, "u1"),
        ("open", 1, "u1"),
        ("error", 1, "c4"),
        ("running", 1, "gone"),
        ("gap", 1, "gone"),
        ("late_call", 1, "ep"),
    }
    assert (found.groups.examined, found.groups.lone) == (1, 1)
    assert found.drift is not None
    assert (found.drift.pairs, found.drift.extending) == (2, 1)
