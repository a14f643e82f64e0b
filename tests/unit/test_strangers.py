"""A proxy without a token lets in programs of this machine, and no web page from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.running_proxy import ask, refused_websocket, running_proxy

from lightning_rl.proxy.strangers import stranger

CALL = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.mark.parametrize(
    "host",
    [
        b"127.0.0.1:8400",
        b"localhost",
        b"LOCALHOST:1",
        b"[::1]:8400",
        b"10.0.0.7",
        b"gpu-box:8400",
        b"host.docker.internal:8400",
        b"api.localhost",
        b"box.local.",
        b"nas.lan",
        b"nas.home.arpa:80",
        b"proxy.example.org:8400",
        b"",
    ],
)
def test_hosts_that_no_page_elsewhere_can_have(host: bytes) -> None:
    assert stranger([(b"host", host)], {"proxy.example.org"}) is None


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:8400",
        b"localhost.evil.example",
        b"[::1].evil.example",
        b"[::1]:80@evil.example",
        b"evil.example/.local",
        b"127.0.0.1:8400:evil.example",
        b"ai.",
        b"127.0.0.1.evil.example",
        b"1.2.3",
    ],
)
def test_public_names(host: bytes) -> None:
    told = stranger([(b"accept", b"*/*"), (b"host", host)], ())
    assert told is not None
    assert host.decode() in told
    assert "allowed_hosts" in told


@pytest.mark.parametrize(
    "origin",
    [
        b"http://localhost:3000",
        b"https://127.0.0.1",
        b"http://[::1]:3000",
        b"http://192.168.0.7:3000",
        b"http://100.64.3.4",  # of a private network across hosts
        b"http://gpu-box",
        b"vscode-webview://x.y",
        b"https://ui.example.org:443",
    ],
)
def test_pages_of_here(origin: bytes) -> None:
    assert stranger([(b"host", b"localhost"), (b"origin", origin)], {"ui.example.org"}) is None


@pytest.mark.parametrize(
    "origin",
    [
        b"https://evil.example",
        b"null",
        b"HTTP://evil.example:80",
        b"",
        b"http://8.8.8.8",
        b"https://1.1.1.1:8443",
        b"http://[2606:4700::1111]",
        b"http://[::ffff:808:808]",
        b"http://",
        b"http://ai.",
        b"http://localhost:80:evil.example",
    ],
)
def test_pages_from_elsewhere(origin: bytes) -> None:
    assert stranger([(b"host", b"localhost"), (b"origin", origin)], ()) is not None


def test_a_page_reaches_neither_the_engine_nor_the_log(tmp_path: Path) -> None:
    page = {"host": "evil.example:8400"}
    with running_proxy(tmp_path) as running:
        num_received = len(running.engine.received)
        for path, body in (
            ("/v1/chat/completions", CALL),
            ("/v1/models", None),
            ("/lightning/api/episodes", None),
            ("/lightning/api/rewards", b"{}"),
        ):
            answer = ask(running.url, path, body, page)
            assert answer.status == 403, path
            assert "allowed_hosts" in json.loads(answer.body)["error"]["message"]
            assert ask(running.url, path, body, {"origin": "null"}).status == 403, path
        assert refused_websocket(running.url, "/v1/realtime", Origin="https://evil.example")[0] == 403
        assert len(running.engine.received) == num_received
        assert running.rows("calls") == []
        assert ask(running.url, "/healthz", headers=page).status in (200, 503)
        of_here = {"origin": "http://localhost:3000"}
        assert ask(running.url, "/v1/chat/completions", CALL, of_here).status == 200


def test_who_has_the_token_may_come_from_anywhere(tmp_path: Path) -> None:
    page = {"host": "proxy.example.org", "origin": "https://ui.example.org"}
    with running_proxy(tmp_path, token="secret") as running:
        assert ask(running.url, "/v1/chat/completions", CALL, page).status == 401
        known = page | {"authorization": "Bearer secret"}
        assert ask(running.url, "/v1/chat/completions", CALL, known).status == 200


def test_hosts_that_the_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PROXY_ALLOWED_HOSTS", "Proxy.example.org, ui.example.org")
    page = {"host": "proxy.example.org", "origin": "https://ui.example.org"}
    with running_proxy(tmp_path) as running:
        assert ask(running.url, "/v1/chat/completions", CALL, page).status == 200
