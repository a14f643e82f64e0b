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
