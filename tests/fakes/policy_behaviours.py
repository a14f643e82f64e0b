"""What people ask of the publisher, and what policies did: the same on both databases."""

from __future__ import annotations

import contextlib
import threading

from fakes.fake_engine import PROBED, model_logprobs
from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import behaviour, write

from lightning_rl.errors import UserError
from lightning_rl.records import PolicyVersion, ProbeSequence, VersionStatus, WeightsKind, now_ms
from lightning_rl.store.append import add_reward
from lightning_rl.store.database import Database
from lightning_rl.store.policies import (
    WAITING,
    WithdrawnError,
    add_candidate,
    lock_policy,
    set_base_live,
    set_version_status,
    versions,
)
from lightning_rl.store.policy_requests import requests_of, waiting_request, waiting_requests
from lightning_rl.store.policy_view import compare, list_policies, load_policy, load_version_view
from lightning_rl.store.promotion import ask_for_version

LIVE = VersionStatus.LIVE


def a_version(number: int, policy: str = "policy") -> PolicyVersion:
    probe = tuple(ProbeSequence(ids, model_logprobs(0, ids), model_logprobs(1, ids)) for ids in PROBED)
    return PolicyVersion(
        policy,
        number,
        VersionStatus.CANDIDATE,
        WeightsKind.LORA,
        "/v",
        None,
        probe,
        None,
        None,
        None,
        now_ms(),
    )


def _live(database: Database, *numbers: int) -> None:
    for number in numbers:
        with database.write() as conn:
            add_candidate(conn, a_version(number))
            set_version_status(conn, "policy", number, LIVE, source="publisher")


def _ask(database: Database, version: int | None, source: str = "ann") -> str:
    with database.write() as conn:
        return ask_for_version(
            conn, "policy", version, "rollback", source=source, has_folder=lambda path: True
        ).id


@behaviour
def test_a_request_makes_a_candidate_and_is_decided_with_it(database: Database) -> None:
    _live(database, 1, 2)
    first = _ask(database, None)
    with database.read() as conn:
        assert [(one.id, one.version, one.from_version) for one in waiting_requests(conn)] == [(first, 1, 2)]
        assert [row.status.value for row in versions(conn, "policy")] == ["candidate", "live"]
    with database.write() as conn:
        set_version_status(
            conn, "policy", 1, LIVE, verdict={"slope": 1.0}, source="publisher", expects=WAITING
        )
    second = _ask(database, 0)
    with database.write() as conn:
        set_base_live(conn, "policy", verdict={"slope": 0.9}, source="publisher")
    with database.read() as conn:
        assert waiting_request(conn, "policy") is None
        found = requests_of(conn, "policy")
        assert [row.status.value for row in versions(conn, "policy")] == ["draining", "draining"]
    assert [(one.id, one.outcome, one.verdict) for one in found] == [
        (first, "live", {"slope": 1.0}),
        (second, "live", {"slope": 0.9}),
    ]


@behaviour
def test_of_wishes_at_the_same_moment_the_last_one_stands(database: Database) -> None:
    """Whatever the order: one request waits, and nothing else of the policy is on its way."""
    _live(database, 1, 2, 3, 4)
    start = threading.Barrier(4)

    def wish(version: int) -> None:
        start.wait()
        with contextlib.suppress(UserError):  # the other was quicker, with the same one
            _ask(database, version, f"person {version}")

    def hand_over() -> None:
        start.wait()
        with database.write() as conn:
            lock_policy(conn, "policy")
            if waiting_request(conn, "policy") is None:  # as a trainer does
                add_candidate(conn, a_version(5))

    threads = [threading.Thread(target=wish, args=(version,)) for version in (0, 1, 2)]
    threads.append(threading.Thread(target=hand_over))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as conn:
        (waits,) = waiting_requests(conn)
        found = requests_of(conn, "policy")
        on_the_way = [row.version for row in versions(conn, "policy") if row.status in WAITING]
    assert on_the_way == [version for version in (waits.version,) if version]
    assert sorted(one.outcome or "" for one in found) == ["", "superseded", "superseded"]


@behaviour
def test_the_publisher_finds_a_version_withdrawn(database: Database) -> None:
    _live(database, 1, 2)
    with database.write() as conn:
        add_candidate(conn, a_version(3))
        set_version_status(conn, "policy", 3, VersionStatus.LOADING, source="publisher", expects=WAITING)
    _ask(database, 1)
    withdrawn = False
    try:
        with database.write() as conn:
            set_version_status(conn, "policy", 3, LIVE, source="publisher", expects=WAITING)
    except WithdrawnError:
        withdrawn = True
    with database.read() as conn:
        status = {row.version: row.status.value for row in versions(conn, "policy")}
    assert withdrawn
    assert status == {1: "candidate", 2: "live", 3: "rejected"}


@behaviour
def test_policies_are_looked_at(database: Database) -> None:
    _live(database, 1)
    for number, (version, value) in enumerate([(0, 0.0), (0, 1.0), (1, 1.0)]):
        name = f"e{number}"
        write(
            database,
            intent(f"c{number}", name, version=version, task="t", tags={"k": "v"}),
            end(f"c{number}", [1, 2, 3], choice([4] * (number + 1))),
        )
        with database.write() as conn:
            add_reward(conn, reward(name, value, final=True))
    with database.read() as conn:
        (line,) = list_policies(conn)
        view = load_policy(conn, "policy")
        one = load_version_view(conn, "policy", 1)
        by_task = compare(conn, "policy", 0, 1)
        by_tag = compare(conn, "policy", 0, 1, by_tag="k")
    assert (line.num_calls, line.num_episodes, line.live_version) == (3, 3, 1)
    assert [facts.served.completion_tokens for facts in view.versions] == [1.5, 3.0]
    assert [event.status for event in one.events] == ["candidate", "live"]
    assert [(part.name, part.delta) for part in by_task.parts] == [("t", 0.5)]
    assert [(part.name, part.delta) for part in by_tag.parts] == [("v", 0.5)]
