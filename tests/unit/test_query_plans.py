"""What people and the trainer ask for reads indexes: no plan goes through all calls, however many there are.

SQLite's plans do not depend on the number of rows while there are no statistics, so a small log shows what a
large one does; `make bench-store` looks at a million calls, on Postgres too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes import full_log
from fakes.log_rows import choice, end, intent, reward
from fakes.query_plans import explaining, full_scans
from fakes.store_behaviours import write

from lightning_rl.records import EpisodeStatus, Purpose, Quarantine, now_ms
from lightning_rl.store import append, curation, doctor, episode_view, listing, policies, policy_view, prune
from lightning_rl.store.database import Database
from lightning_rl.trainer.planning.source import GroupSource


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(f"sqlite:///{tmp_path}/log.db")
    for number in range(4):
        name = f"e{number}"
        write(opened, intent(f"a{number}", name, task="t", agent="a"), end(f"a{number}"))
        write(
            opened, intent(f"b{number}", name), end(f"b{number}", [1], choice(quarantine=Quarantine.IMAGES))
        )
        with opened.write() as conn:
            append.add_reward(conn, reward(name, float(number % 2), final=True))
    write(opened, intent("u", None), end("u"))
    yield opened
    opened.close()


def test_the_check_sees_a_scan(database: Database) -> None:
    with explaining(database) as plans, database.read() as conn:
        conn.execute(sa.text("SELECT sum(retry_count) FROM calls")).all()
        conn.execute(sa.text("SELECT max(id) FROM calls WHERE episode_id IS NULL")).all()
        conn.execute(sa.text("SELECT id FROM calls ORDER BY started_at_ms")).all()
        conn.execute(sa.text("SELECT retry_count FROM calls WHERE id = 'u'")).all()
    assert [plan in full_scans(plans) for plan in plans] == [True, False, True, False]


def test_lists_and_views(database: Database) -> None:
    for wanted in (
        listing.EpisodeFilter(),
        listing.EpisodeFilter(task="t", batch="", agent="a", unrewarded=True),
        listing.EpisodeFilter(status=EpisodeStatus.ENDED, purpose=Purpose.TRAIN, policy="policy"),
        listing.EpisodeFilter(tags={"k": "v"}, since_ms=1, until_ms=now_ms(), with_gap=True, late_calls=True),
    ):
        for after in (None, "e1"):
            with explaining(database) as plans, database.read() as conn:
                listing.list_episodes(conn, wanted, after=after)
            assert full_scans(plans, ("calls", "choices", "rewards", "events")) == []
    with explaining(database) as plans, database.read() as conn:
        listing.list_unattributed(conn)
        listing.list_unattributed(conn, after="x")
        episode_view.load_view(conn, "e1")
        curation.idle_episodes(conn, idle_ms=1, at_ms=now_ms())
    assert full_scans(plans, ("calls", "choices", "rewards", "events", "episodes")) == []
    assert any("ix_calls_unattributed" in plan for plan in plans)


def test_a_checkup(database: Database) -> None:
    with explaining(database) as plans, database.read() as conn:
        found = doctor.check_up(conn)
    assert found.counts.calls == 9
    assert full_scans(plans) == []
    scanned = full_scans(plans, ("choices", "rewards", "events"))
    assert [plan.split("\n")[0] for plan in scanned] == ["SELECT count(*) AS count_1 "], (
        "all answers are counted"
    )
    assert "COVERING INDEX" in scanned[0]


def test_policies_and_their_versions(database: Database) -> None:
    with database.write() as conn:
        policies.add_candidate(conn, full_log.version(1))
    with explaining(database) as plans, database.read() as conn:
        (line,) = policy_view.list_policies(conn)
        policy_view.load_policy(conn, "policy")
        policy_view.load_version_view(conn, "policy", 1)
        policy_view.compare(conn, "policy", 0, 1)
        policy_view.compare(conn, "policy", 0, 1, by_tag="k")
    assert (line.num_calls, line.num_episodes) == (9, 4)
    manifests = ("manifest_episodes", "manifest_choices")
    assert full_scans(plans, ("calls", "choices", "rewards", "events", "episodes", *manifests)) == []
    counted = [plan for plan in plans if "count(*)" in plan and "FROM calls" in plan]
    assert counted
    assert all("ix_calls_policy" in plan for plan in counted)


def test_a_portion_of_a_prune(database: Database) -> None:
    """It holds the lock that every writer waits for."""
    with explaining(database) as plans:
        done = prune.prune(database, prune.Selection(before_ms=now_ms() + 60_000))
    assert (done.rows["calls"], done.rows["rewards"], done.rows["episodes"]) == (9, 4, 4)
    assert any(plan.startswith("DELETE FROM rewards") for plan in plans)
    tables = (
        "calls",
        "choices",
        "rewards",
        "events",
        "token_blocks",
        "manifest_episodes",
        "manifest_choices",
    )
    assert full_scans(plans, tables) == []


def test_a_step_of_the_trainer(database: Database) -> None:
    with explaining(database) as plans:
        (groups,) = GroupSource(database, "policy", "run", 8).ready()
    assert len(groups[0].episodes) == 4
    assert full_scans(plans, ("calls", "choices", "rewards", "episodes", "manifest_episodes")) == []
    # By status alone all ended episodes would be read for every group: minutes, at a million calls.
    ready = next(plan for plan in plans if plan.startswith("SELECT groups.id"))
    assert "ix_episodes_status" not in ready
