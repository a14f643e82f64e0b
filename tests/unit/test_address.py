"""Who is calling: which mark wins, what conflicts, what is left for the engine."""

from __future__ import annotations

import pytest

from lightning_rl.errors import UserError
from lightning_rl.proxy.attribution.address import attribute, misspelt, read_address, without_episode
from lightning_rl.proxy.attribution.keys import new_key


def test_nothing_named() -> None:
    address = read_address(b"/v1/chat/completions", [(b"user-agent", b"x")])
    found = attribute(address, {"messages": []})
    assert address.engine_path == b"/v1/chat/completions"
    assert (found.episode_id, found.rule, found.conflict) == (None, "none", None)


def test_path_names_everything_and_is_taken_off() -> None:
    path = b"/episodes/a%2Fb%20%C3%BC/tasks/t1/batches/b1/agents/writer/v1/chat/completions"
    address = read_address(path, [])
    found = attribute(address, None)
    assert address.engine_path == b"/v1/chat/completions"
    assert (found.episode_id, found.task_id, found.batch, found.agent) == ("a/b ü", "t1", "b1", "writer")
    assert found.rule == "path"


def test_headers_with_path_only_for_the_agent() -> None:
    address = read_address(b"/agents/planner/v1/models", [(b"x-lightning-episode", b"e")])
    found = attribute(address, None)
    assert (found.episode_id, found.agent, found.rule) == ("e", "planner", "header")
    assert address.engine_path == b"/v1/models"


def test_headers() -> None:
    headers = [
        (b"x-lightning-episode", b" e1 "),
        (b"x-lightning-task", b"t"),
        (b"x-lightning-batch", b"b"),
        (b"x-lightning-agent", "lektör".encode()),
        (b"x-lightning-tags", b"seed=7, split = train ,flag"),
    ]
    found = attribute(read_address(b"/v1/completions", headers), None)
    assert (found.episode_id, found.task_id, found.batch, found.agent) == ("e1", "t", "b", "lektör")
    assert found.tags == {"seed": "7", "split": "train", "flag": ""}
    assert found.rule == "header"


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        (b"x-session-id", "alias:X-Session-Id"),
        (b"helicone-session-id", "alias:Helicone-Session-Id"),
        (b"x-litellm-session-id", "alias:X-Litellm-Session-Id"),
        (b"litellm_session_id", "alias:litellm_session_id"),
    ],
)
def test_aliases(header: bytes, rule: str) -> None:
    found = attribute(read_address(b"/v1/completions", [(header, b"s")]), None)
    assert (found.episode_id, found.rule) == ("s", rule)


def test_body_marks_are_the_weakest() -> None:
    body = {"metadata": {"episode_id": "from-body", "task_id": "t", "agent": "a"}}
    found = attribute(read_address(b"/v1/completions", []), body)
    assert (found.episode_id, found.task_id, found.agent, found.rule) == ("from-body", "t", "a", "body")
    found = attribute(read_address(b"/v1/completions", []), {"litellm_session_id": "s"})
    assert (found.episode_id, found.rule) == ("s", "alias:litellm_session_id")


def test_the_strongest_mark_wins_and_the_others_are_told() -> None:
    headers = [(b"x-lightning-episode", b"H"), (b"x-session-id", b"P"), (b"helicone-session-id", b"S")]
    found = attribute(read_address(b"/episodes/P/v1/models", headers), {"metadata": {"episode_id": "B"}})
    assert (found.episode_id, found.rule) == ("P", "path")
    assert found.conflict == "header says 'H'; alias:Helicone-Session-Id says 'S'; body says 'B'"


def test_agreeing_marks_do_not_conflict() -> None:
    found = attribute(read_address(b"/episodes/e/v1/models", [(b"x-lightning-episode", b"e")]), None)
    assert found.conflict is None


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (b"/episodes//v1/models", []),
        (b"/episodes/e", []),
        (b"/episodes/a%00b/v1/models", []),
        (b"/episodes/a/episodes/b/v1/models", []),
        (b"/episodes/" + b"x" * 257 + b"/v1/models", []),
        (b"/v1/models", [(b"x-lightning-episode", b"x" * 257)]),
        (b"/v1/models", [(b"x-lightning-agent", b"a\x01b")]),
        (b"/episodes/%ff/v1/models", []),
        (b"/episodes/%ed%a0%80/v1/models", []),
        (b"/episodes/./v1/models", []),
        (b"/v1/models", [(b"x-lightning-episode", b"..")]),
    ],
)
def test_what_can_not_be_a_name_is_refused_in_one_line(
    path: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(UserError) as error:
        read_address(path, headers)
    assert "\n" not in str(error.value)


def test_foreign_marks_that_can_not_be_names_are_no_marks_and_told() -> None:
    address = read_address(b"/v1/models", [(b"x-session-id", b"x" * 999), (b"x-lightning-episode", b" ")])
    body = {"metadata": {"episode_id": 7, "agent": "a\x01"}, "litellm_session_id": ["a"]}
    found = attribute(address, body)
    assert (found.episode_id, found.rule, found.agent) == (None, "none", None)
    assert found.conflict == (
        "not a name: X-Lightning-Episode is empty, X-Session-Id is longer than 256 characters, "
        "metadata.episode_id is not text, metadata.agent has control characters, "
        "litellm_session_id is not text"
    )
    found = attribute(read_address(b"/episodes/e/v1/models", []), {"metadata": {"episode_id": ""}})
    assert (found.episode_id, found.conflict) == ("e", "not a name: metadata.episode_id is empty")
    for absent in ({"metadata": "text"}, {"metadata": {"episode_id": None}}, {"metadata": {}}):
        assert attribute(read_address(b"/v1/models", []), absent).conflict is None


def test_a_key_is_stronger_than_the_body_and_weaker_than_path_and_headers() -> None:
    body = {"metadata": {"episode_id": "B", "agent": "body-agent"}}
    found = attribute(read_address(b"/v1/models", []).with_key("K", "key-agent"), body)
    assert (found.episode_id, found.rule, found.agent) == ("K", "key", "key-agent")
    assert found.conflict == "body says 'B'"
    headers = [(b"x-session-id", b"S"), (b"x-lightning-agent", b"header-agent")]
    found = attribute(read_address(b"/v1/models", headers).with_key("K", "key-agent"), None)
    assert (found.episode_id, found.rule, found.agent) == ("S", "alias:X-Session-Id", "header-agent")
    assert found.conflict == "key says 'K'"
    found = attribute(read_address(b"/episodes/P/v1/models", []).with_key("K", None), None)
    assert (found.episode_id, found.rule) == ("P", "path")


def test_a_key_is_no_name() -> None:
    key = new_key()
    with pytest.raises(UserError, match="API key"):
        read_address(f"/episodes/{key}/v1/models".encode(), [])
    found = attribute(read_address(b"/v1/models", []), {"metadata": {"episode_id": key}})
    assert found.episode_id is None
    assert key not in str(found)


def test_a_task_without_an_episode_is_told_and_in_a_path_refused() -> None:
    address = read_address(b"/v1/models", [(b"x-lightning-task", b"t"), (b"x-lightning-episode", b"")])
    found = without_episode(address, attribute(address, None))
    assert found.task_id == "t"
    assert found.conflict == (
        "not a name: a task or a batch is named, but no episode, X-Lightning-Episode is empty"
    )
    address = read_address(b"/v1/models", [])
    found = without_episode(address, attribute(address, {"metadata": {"batch": "b"}}))
    assert found.conflict == "not a name: a task or a batch is named, but no episode"
    address = read_address(b"/tasks/t/agents/a/v1/models", [])
    with pytest.raises(UserError, match="/episodes/EPISODE/v1"):
        without_episode(address, attribute(address, None))
    address = read_address(b"/agents/judge/v1/models", [])
    assert without_episode(address, attribute(address, None)).conflict is None


@pytest.mark.parametrize("path", [b"/episode/a/v1/models", b"/episodes/a/foo/b/v1/models", b"/Tasks/t/v1"])
def test_a_path_that_was_meant_for_us_is_told_the_form(path: bytes) -> None:
    assert "the base URL is /episodes/EPISODE/v1" in str(misspelt(path))


@pytest.mark.parametrize("path", [b"/nope", b"/v1/episodes/a", b"/tasksheet", b"/chat/completions"])
def test_other_paths_are_the_engines(path: bytes) -> None:
    assert misspelt(path) is None
