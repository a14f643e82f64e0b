"""Mistakes in requests to our API: one clear line each, in the shape of every other error."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fakes.running_proxy import Running, ask, running_proxy


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_proxy(tmp_path_factory.mktemp("api")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rewards", '{"episode": "x"}', "field 'value' is missing"),
        ("/rewards", "{}", "field 'episode' is missing (and 1 more)"),
        ("/rewards", '{"episode": "x", "value": "much"}', "field 'value' must be a number, not \"much\""),
        (
            "/rewards",
            '{"episode": "x", "value": 1, "choice": -1}',
            "field 'choice' must be at least 0, not -1",
        ),
        ("/rewards", '{"episode": "x", "value": true}', "field 'value' must be a number, not true"),
        ("/rewards", '{"episode": "x", "value": null}', "field 'value' must be a number, not null"),
        (
            "/rewards",
            '{"episode": "x", "value": 1e999}',
            "field 'value' must be a finite number, not Infinity",
        ),
        ("/rewards", '{"episode": "", "value": 1}', "field 'episode' is empty"),
        ("/rewards", '{"episode": ["x"], "value": 1}', "field 'episode' must be text, not [\"x\"]"),
        (
            "/rewards",
            '{"episode": "x", "value": 1, "extra": 1}',
            "field 'extra' is not a field of this request",
        ),
        (
            "/rewards",
            '{"episode": "x", "value": 1, "final": "maybe"}',
            "field 'final' must be true or false, not \"maybe\"",
        ),
        (
            "/rewards",
            '{"episode": "a\\ud800", "value": 1}',
            "field 'episode' has half characters (lone surrogates)",
        ),
        (
            "/rewards",
            '{"episode": "x", "value": "\\ud800"}',
            "field 'value' must be a number, not \"?\"",
        ),
        (
            "/rewards",
            '{"episode": "x", "value": 1, "created_at_ms": 1796079261639000}',
            "field 'created_at_ms' is milliseconds since 1970, and 1796079261639000 has yet to come "
            "(microseconds?)",
        ),
        ("/rewards", "[1]", "the body must be an object, not [1]"),
        ("/rewards", "", "the body is missing"),
        ("/rewards", '{"episode"', "the body is not JSON: Expecting ':' delimiter"),
        ("/episodes", '{"expected_size": 0}', "field 'expected_size' must be at least 1, not 0"),
        ("/episodes", '{"expected_size": 1.5}', "field 'expected_size' must be a whole number, not 1.5"),
        ("/episodes", '{"purpose": "fun"}', "field 'purpose' must be 'train' or 'eval', not \"fun\""),
        ("/episodes", '{"tags": {"a": 1}}', "field 'tags.a' must be text, not 1"),
        (
            "/episodes",
            '{"tags": "' + "x" * 99 + '"}',
            "field 'tags' must be an object, not \"" + "x" * 59 + "…",
        ),
        (
            "/episodes/e/end",
            '{"status": "over"}',
            "field 'status' must be 'ended', 'failed' or 'excluded', not \"over\"",
        ),
    ],
)
def test_one_line(running: Running, path: str, body: str, message: str) -> None:
    answer = ask(running.url, f"/lightning/api{path}", body.encode())
    assert answer.status == 422
    assert json.loads(answer.body) == {"error": {"message": message}}


HUGE = "9" * 23


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            f"/episodes?since_ms={HUGE}",
            None,
            422,
            f"field 'since_ms' must be at most {2**53}, not \"{HUGE}\"",
        ),
        (
            f"/episodes?until_ms=-{HUGE}",
            None,
            422,
            f"field 'until_ms' must be at least -{2**53}, not \"-{HUGE}\"",
        ),
        (
            f"/calls/c/choices/{HUGE}/used",
            '{"used": true}',
            422,
            f"field 'index' must be at most 2147483647, not \"{HUGE}\"",
        ),
        ("/episodes?tsk=t", None, 400, "query parameter 'tsk' is not one of this request's (after, agent, "),
        ("/status?x=1", None, 400, "query parameter 'x' is not one of this request's (none)"),
        ("/calls/c/kind", '{"kind": "judge"}', 404, "no call 'c' in the log; check its id and the database"),
        ("/calls/c/choices/0/used", '{"used": true}', 404, "no choice 0 of a call 'c' in the log"),
        ("/episodes/e/calls", '{"calls": ["c"], "create": true}', 404, "no call 'c' in the log; "),
        ("/episodes/e/tags", '{"set": {"": "x"}}', 422, "a key of field 'set' is empty"),
        ("/episodes", '{"episode": ".."}', 422, "field 'episode' is no name: a path can't hold it"),
    ],
)
def test_other_mistakes(running: Running, path: str, body: str | None, status: int, message: str) -> None:
    answer = ask(running.url, f"/lightning/api{path}", None if body is None else body.encode())
    said = json.loads(answer.body)["error"]["message"]
    assert (answer.status, said[: len(message)]) == (status, message)


def test_a_body_that_does_not_say_that_it_is_json(running: Running) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = ask(running.url, "/lightning/api/rewards", b'{"episode": "x", "value": 1}', form)
    assert answer.status == 422
    assert "add the header `content-type: application/json`" in json.loads(answer.body)["error"]["message"]


def test_what_looks_at_our_health_may_add_what_it_likes(running: Running) -> None:
    assert ask(running.url, "/healthz?probe=1").status == 200
    assert ask(running.url, "/lightning/metrics?probe=1").status == 200
