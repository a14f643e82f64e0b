"""What rules match, and keys, are not in the log: not as text, not as token ids."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_vllm import FakeVllm
from fakes.log_rows import choice, end, intent
from fakes.running_proxy import Running, ask, running_proxy
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.errors import SettingsError
from lightning_rl.proxy.redaction import BUILT_IN, Redactor, rules_of
from lightning_rl.records import Quarantine
from lightning_rl.settings.proxy import ProxySettings, RedactionRule
from lightning_rl.store.bodies import load_bodies
from lightning_rl.store.database import Database
from lightning_rl.store.read import load_episodes

CHAT = "/v1/chat/completions"


def redactor(*rules: dict[str, str], secrets: tuple[str, ...] = ()) -> Redactor:
    return Redactor(rules_of([RedactionRule(**rule) for rule in rules]), secrets)


def body(found: Redactor, text: str) -> str:
    prepared = found.prepare(intent("c", body=text.encode()))
    return typing.cast(Any, prepared).request_body.decode()


def test_a_body_is_redacted_text_by_text_and_keeps_its_other_bytes() -> None:
    rules = redactor({"builtin": "email", "replacement": "<mail>"})
    sent = '{ "a" : 1.50,"a":[1e400 , "plain \\u00e9"], "m":"to \\u0061nn@example.org\\n", "bob@x.de": null}'
    kept = '{ "a" : 1.50,"a":[1e400 , "plain \\u00e9"], "m":"to <mail>\\n", "<mail>": null}'
    assert body(rules, sent) == kept
    assert body(rules, '{"a": "nothing here"}') == '{"a": "nothing here"}'
    assert body(rules, "not json, ann@example.org") == "not json, <mail>"
    assert rules.num_by_rule == {"email": 2}


def test_the_model_s_name_stands_in_the_body_too() -> None:
    rules = redactor({"builtin": "email", "replacement": "<mail>"})
    sent = intent("c", body=b'{"model": "ann@example.org"}')
    kept = rules.prepare(replace(sent, requested_model="ann@example.org", served_model="ann@example.org"))
    assert "example" not in repr(kept)


def test_numbers_and_groups_in_replacements() -> None:
    rules = redactor({"pattern": r"(\d{4})\d{8,}", "replacement": r"\1…", "name": "account"})
    assert body(rules, '{"account": 123456789012, "n": 12}') == '{"account": "1234\\u2026", "n": 12}'


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_body_without_a_match_is_never_touched(doc: Any) -> None:
    sent = json.dumps(doc)
    assert body(redactor({"pattern": "\ue000never\ue000"}), sent) == sent


def test_a_matching_request_takes_all_token_ids_along() -> None:
    rules = redactor({"pattern": "secret plan", "name": "plan"})
    rules.prepare(intent("c", body=b'{"messages": [{"content": "the secret plan"}]}'))
    got = typing.cast(Any, rules.prepare(end("c", [1, 2], error="no secret plan")))
    assert (got.prompt_ids, got.error) == (None, "no [redacted]")
    (kept,) = got.choices
    assert (kept.completion_ids, kept.behavior_logprobs, kept.quarantine) == (None, None, Quarantine.REDACTED)
    assert rules.num_by_rule == {"plan": 1}  # a call is counted once


def test_a_matching_answer_takes_only_its_own_along() -> None:
    rules = redactor({"pattern": "secret"})
    rules.prepare(intent("c"))
    call = {"function": {"name": "send", "arguments": '{"x": "a secret"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    got = typing.cast(Any, rules.prepare(end("c", [1, 2], choice(message=message), choice(index=1))))
    hidden, other = got.choices
    assert hidden.message["tool_calls"][0]["function"]["arguments"] == '{"x": "a [redacted]"}'
    assert (hidden.completion_ids, hidden.quarantine) == (None, Quarantine.REDACTED)
    assert (other, got.prompt_ids) == (choice(index=1), end("c", [1, 2]).prompt_ids)


def test_without_rules_nothing_is_looked_at_but_keys() -> None:
    entries = [intent("c", body=b'{"a": "ann@example.org"}'), end("c")]
    plain = redactor()
    assert all(plain.prepare(entry) is entry for entry in entries)


def test_keys_in_bodies_are_hidden_unless_they_are_placeholders() -> None:
    plain = redactor(secrets=("token-of-the-proxy", "short"))
    sent = '{"headers": {"Authorization": "Bearer KEY"}}'
    lightning_key = "lk-" + "a" * 43
    for key in ("token-of-the-proxy", lightning_key):
        assert body(plain, sent.replace("KEY", key)) == sent.replace("KEY", "[key]")
    own = replace(
        intent("c", body=sent.replace("KEY", "sk-client-key-123").encode()),
        client_keys=(b"sk-client-key-123",),
    )
    assert typing.cast(Any, plain.prepare(own)).request_body.decode() == sent.replace("KEY", "[key]")
    empty = replace(intent("c", body=b'{"a": "EMPTY short"}'), client_keys=(b"EMPTY",))
    assert plain.prepare(empty) is empty
    assert "client-key" not in repr(own.client_keys) or "client_keys" not in repr(own)


def test_retries_of_a_redacted_request_have_the_same_hash() -> None:
    rules = redactor({"pattern": "x+"})
    hashes = {
        typing.cast(Any, rules.prepare(intent(name, body=b'{"a": "xx"}'))).request_hash for name in "ab"
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("name", "matches", "others"),
    [
        ("email", ["ann.b+c@mail.example.org"], ["@ann", "a@b", "user@localhost"]),
        (
            "api-key",
            ["sk-proj-abcdefghijklmnop", "AKIAABCDEFGHIJKLMNOP", "hf_" + "a" * 34],
            ["sk-short", "task-force-one-two-three"],
        ),
        ("bearer", ["Authorization: Bearer abcdefghij.klmnop-q"], ["the bearer of bad news"]),
        ("ip-address", ["at 192.168.0.1."], ["1.2.3", "999.1.1.1", "version 1.2.3.4567"]),
        ("phone", ["+49 30 1234567", "+1 (555) 123-4567"], ["1+2 345", "2024-01-02", "a+49301234567"]),
    ],
)
def test_built_in_patterns(name: str, matches: list[str], others: list[str]) -> None:
    (rule,) = rules_of([RedactionRule(builtin=typing.cast(Any, name))])
    assert all(rule.pattern.search(text) for text in matches)
    assert not [text for text in others if rule.pattern.search(text)]


def test_every_built_in_pattern_can_be_named_in_the_settings() -> None:
    named = typing.get_args(typing.get_args(RedactionRule.model_fields["builtin"].annotation)[0])
    assert set(named) == set(BUILT_IN)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('pattern = "("', "regular expression"),
        ('pattern = "a"\nreplacement = "\\\\1"', "regular expression"),
        ('pattern = "a*"', "empty text"),
        ('builtin = "faces"', "redact.0.builtin"),
        ('replacement = "x"', "either a pattern or a builtin"),
        ('pattern = "a"\nextra = 1', "unknown setting"),
    ],
)
def test_mistakes_in_rules_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(f"[[redact]]\n{text}\n")
    with pytest.raises(SettingsError) as error:
        ProxySettings.load(file)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# --- through the proxy ---


def everything(database: Database) -> str:
    """Every value of every row, bodies and messages unpacked."""
    import zlib

    from lightning_rl.store.schema import metadata

    said: list[str] = []
    with database.read() as conn:
        for table in metadata.sorted_tables:
            for row in conn.execute(table.select()):
                for value in row:
                    said.append(str(value))
                    if isinstance(value, bytes):
                        said.append(value.decode("latin-1"))
                        for start in (0, 1):
                            try:
                                said.append(zlib.decompress(value[start:]).decode("latin-1"))
                            except zlib.error:
                                continue
    return "\n".join(said)


def test_a_redacted_call_leaves_neither_text_nor_tokens(tmp_path: Path) -> None:
    engine = FakeVllm()
    with running_proxy(
        tmp_path, engine, redact=[{"builtin": "email"}, {"pattern": "ü€", "name": "answer"}]
    ) as running:
        asked = json.dumps({"model": "base", "messages": [{"role": "user", "content": "ann@example.org"}]})
        plain = asked.replace("ann@example.org", "hi")
        for stream in ("", ', "stream": true'):
            sent = (asked[:-1] + stream + "}").encode()
            assert (
                ask(running.url, f"/episodes/asked{CHAT}", sent).body
                == ask(running.engine_url, CHAT, sent).body
            )
        ask(running.url, f"/episodes/answered{CHAT}", plain.encode())
        engine.num_tokens = 3  # too short for the words of the rule
        ask(running.url, f"/episodes/untouched{CHAT}", plain.encode())
        status = json.loads(ask(running.url, "/lightning/api/status").body)
        assert status["recording"]["calls_redacted"] == {"email": 2, "answer": 1}
        _check_redacted(running)


def _check_redacted(running: Running) -> None:
    with running.database.read() as conn:
        asked, answered, untouched = load_episodes(conn, ["asked", "answered", "untouched"])
        bodies = load_bodies(conn, [row["request_body"] for row in running.rows("calls")])
    for call in (*asked.calls, *answered.calls):
        (kept,) = call.choices
        assert (len(kept.completion_ids), kept.quarantine) == (0, Quarantine.REDACTED)
    assert [len(call.prompt_ids) for call in asked.calls] == [0, 0]
    assert len(answered.calls[0].prompt_ids) > 0
    assert untouched.calls[0].choices[0].quarantine is None
    assert sum(b"[redacted]" in sent for sent in bodies) == 2
    log = everything(running.database)
    assert "ann@example.org" not in log
    assert "ü€" not in log


def test_no_key_is_anywhere_in_the_database(tmp_path: Path) -> None:
    """However a client sends one; a URL with one is refused, and nothing of it written."""
    client_key = "sk-the-clients-own-key"
    token = "token-of-the-proxy"
    with running_proxy(tmp_path, token=token, engine_api_key="key-of-the-engine") as running:
        auth = {"Authorization": f"Bearer {token}"}
        new = ask(running.url, "/lightning/api/episodes", b'{"episode": "e"}', auth)
        assert new.status == 200
        issued = json.loads(ask(running.url, "/lightning/api/episodes/e/keys", b"{}", auth).body)["key"]
        for secret in (token, issued, client_key):
            doc = {
                "model": "base",
                "messages": [{"role": "user", "content": f"my key is {secret}"}],
                "metadata": {"note": secret},
                "extra_headers": {"Authorization": f"Bearer {secret}"},
                "tools": [{"type": "mcp", "headers": {"Authorization": secret}}],
                "stop": [secret],
            }
            for headers in (
                {"Authorization": f"Bearer {secret}", "X-Api-Key": token},
                {"X-Api-Key": secret, "Authorization": f"Bearer {token}"},
                {"Api-Key": secret, "X-Api-Key": token, "Proxy-Authorization": f"Basic {secret}"},
            ):
                for more in ({}, {"stream": True}):
                    sent = json.dumps(doc | more).encode()
                    assert ask(running.url, CHAT, sent, headers).status == 200
                ask(running.url, f"{CHAT}?api_key={secret}&x=1", sent, headers)
                ask(running.url, CHAT, b"not json " + secret.encode(), headers)
        ask(running.url, "/lightning/api/status", headers=auth)
        log = everything(running.database)
        received = [str(request["headers"]) + request["query"] for request in running.engine.received]
    assert "my key is [key]" in log
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (token, issued, client_key, "key-of-the-engine"):
        assert secret not in log
        assert secret.encode() not in files
    for secret in (token, issued):
        assert not [request for request in received if secret in request]
