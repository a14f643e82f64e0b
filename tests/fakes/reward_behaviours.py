"""What many rewards, episodes as a judge sees them, and a policy's history have to be on both databases."""

from __future__ import annotations

import json

import pytest
from fakes.log_rows import choice, end, intent
from fakes.store_behaviours import behaviour, write

from lightning_rl.errors import UnknownEpisodeError, UserError
from lightning_rl.records import CallKind, EpisodeStatus, Purpose
from lightning_rl.store.append import create_episode
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import end_episode, mark_gap
from lightning_rl.store.history import ended_episodes
from lightning_rl.store.read import load_episodes
from lightning_rl.store.reward_lines import read_lines
from lightning_rl.store.reward_rows import import_rewards, rewards_of, unjudged_episodes
from lightning_rl.store.seen import load_seen


def _import(database: Database, *lines: object) -> tuple[int, int]:
    numbered = read_lines([json.dumps(line) for line in lines], "x")
    with database.write() as conn:
        found = import_rewards(conn, numbered)
    return found.added, found.known


@behaviour
def test_many_rewards_are_written_together_or_not_at_all(database: Database) -> None:
    write(database, *(entry for i in range(3) for entry in (intent(f"c{i}", f"e{i}"), end(f"c{i}"))))
    lines = [{"id": f"r{i}", "episode": f"e{i % 3}", "value": i, "note": "fine \u00e9"} for i in range(200)]
    last = {"id": "last", "episode": "e0", "value": 7, "supersedes": "r3"}
    with pytest.raises(UserError, match="line 201: no episode 'nobody'"):
        _import(database, *lines, {"episode": "nobody", "value": 1})
    with pytest.raises(UserError, match="line 202: episode 'e1' has no reward 'r3'"):
        _import(database, *lines, last, {"episode": "e1", "value": 1, "supersedes": "r3"})
    with pytest.raises(
        UserError, match="line 201: reward 'r3' is about episode, and one about call c0 can't"
    ):
        _import(database, *lines, last | {"call": "c0"})
    with database.read() as conn:
        assert rewards_of(conn, "e0") == ()
    assert _import(database, *lines, last) == (201, 0)
    assert _import(database, *lines, last, {"id": "r200", "episode": "e2", "value": 0}) == (1, 201)
    with pytest.raises(UserError, match=r"reward 'r7' is there already, its value 7\.0, not 8\.0"):
        _import(database, {"id": "r7", "episode": "e1", "value": 8})
    with database.read() as conn:
        assert len(rewards_of(conn, "e0")) == 68
        assert {e.status for e in load_episodes(conn, ["e0", "e1", "e2"])} == {EpisodeStatus.ENDED}
        with pytest.raises(UnknownEpisodeError):
            rewards_of(conn, "nobody")


@behaviour
def test_a_row_under_a_known_id_must_say_the_same_in_every_field(database: Database) -> None:
    write(database, intent("c0", "e0"), end("c0", (1,), choice(), choice(index=1)))
    line = {
        "id": "r",
        "episode": "e0",
        "value": 1,
        "call": "c0",
        "token_start": 0,
        "token_end": 1,
        "choice": 0,
    }
    line |= {"final": False, "note": "good"}
    assert _import(database, line) == (1, 0)
    assert _import(database, line, line | {"created_at_ms": 10**12}) == (0, 2)
    others: dict[str, object] = {"token_start": 1, "token_end": 2, "choice": 1, "final": True, "note": "bad"}
    for field, other in others.items():
        with pytest.raises(UserError, match="line 2: reward 'r' is there already, its "):
            _import(
                database, line, line | {field: other} | ({"token_end": 2} if field == "token_start" else {})
            )
    with pytest.raises(UserError, match="its note 'good', not None"):
        _import(database, {name: value for name, value in line.items() if name != "note"})
    with database.read() as conn:
        assert len(rewards_of(conn, "e0")) == 1


@behaviour
def test_a_judge_sees_words_and_only_what_is_over(database: Database) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}]}).encode()
    said = choice(message={"role": "assistant", "content": "4"})
    write(
        database,
        intent("c1", "over", task="t", batch="b", agent="solver", body=body, tags={"k": "v"}),
        end("c1", (1,), said),
        intent("c2", "over", kind=CallKind.JUDGE, body=b"no json"),
        intent("c3", "running"),
    )
    with database.write() as conn:
        end_episode(conn, "over", by="api")
    with database.read() as conn:
        assert unjudged_episodes(conn, "x") == ["over"]
        (seen,) = load_seen(conn, ["over"])
        with pytest.raises(UnknownEpisodeError):
            load_seen(conn, ["over", "nobody"])
    assert (seen.task, seen.batch, seen.tags, seen.answer) == ("t", "b", {"k": "v"}, "4")
    assert [(call.kind, call.messages, len(call.answers)) for call in seen.calls] == [
        (CallKind.POLICY, ({"role": "user", "content": "2 + 2?"},), 1),
        (CallKind.JUDGE, (), 0),
    ]
    _import(database, {"id": "r", "episode": "over", "value": 1})
    with database.read() as conn:
        assert unjudged_episodes(conn, "x") == []
        assert unjudged_episodes(conn, "x", again=True) == unjudged_episodes(conn, "y") == ["over"]
    _import(database, {"episode": "over", "value": 0, "source": "human", "supersedes": "r"})
    with database.read() as conn:
        assert unjudged_episodes(conn, "x") == ["over"]


@behaviour
def test_a_policys_history_is_what_it_ended_well(database: Database) -> None:
    names = ("good", "later", "other", "failed", "gap", "running", "eval")
    with database.write() as conn:
        create_episode(conn, episode_id="eval", purpose=Purpose.EVAL)
    for name in names:
        policy = "other" if name == "other" else "policy"
        write(
            database, intent(f"c-{name}", name, task="t", tags={"k": name}, policy=policy), end(f"c-{name}")
        )
    with database.write() as conn:
        mark_gap(conn, "gap", source="recorder")
        for name in names:
            if name != "running":
                failed = EpisodeStatus.FAILED if name == "failed" else EpisodeStatus.ENDED
                end_episode(conn, name, status=failed, by="api")
    _import(database, {"episode": "good", "value": 0.5})
    with database.read() as conn:
        found = ended_episodes(conn, "policy")
    assert sorted(past.id for past in found) == ["good", "later"]
    (good,) = (past for past in found if past.id == "good")
    assert (good.task_id, good.tags, [row.value for row in good.rewards]) == ("t", {"k": "good"}, [0.5])
