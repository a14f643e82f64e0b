"""WebSockets: who gets through, and how refusals look. Whole conversations: tests/conformance."""

from __future__ import annotations

from pathlib import Path

from fakes.running_proxy import Running, refused_websocket, running_proxy

from lightning_rl.proxy.routes import is_websocket_route


def requests_for(running: Running, path: str) -> int:
    return sum(request["path"] == path for request in running.engine.received)


def test_an_engine_that_has_no_such_route_says_so_itself(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        assert refused_websocket(running.url, "/v1/realtime") == (404, {"detail": "Not Found"})
        assert refused_websocket(running.url, "/episodes/e/v1/realtime") == (404, {"detail": "Not Found"})
        assert requests_for(running, "/v1/realtime") == 2
        assert running.rows("calls") == []


def test_other_paths_never_reach_the_engine(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        num_received = len(running.engine.received)
        for path in (
            "/pause",
            "/v1/chat/completions",
            "/v1/realtime/",
            "//v1/realtime",
            "/lightning/api/status",
        ):
            assert refused_websocket(running.url, path)[0] == 403, path
        assert len(running.engine.received) == num_received


def test_the_token_is_asked_for(tmp_path: Path) -> None:
    with running_proxy(tmp_path, token="secret") as running:
        status, error = refused_websocket(running.url, "/v1/realtime")
        assert (status, error["error"]["code"]) == (401, 401)
        assert refused_websocket(running.url, "/v1/realtime", Authorization="Bearer wrong")[0] == 401
        assert requests_for(running, "/v1/realtime") == 0
        assert refused_websocket(running.url, "/v1/realtime", Authorization="Bearer secret")[0] == 404
        assert "secret" not in str(running.engine.received)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        running.proxy.engines.all[0].url = "http://127.0.0.1:9"
        status, error = refused_websocket(running.url, "/v1/realtime")
        assert status == 502
        assert "not reachable" in error["error"]["message"]


def test_routes_are_compared_as_the_engine_reads_them() -> None:
    assert is_websocket_route(b"/v1/realtime")
    assert is_websocket_route(b"/v1/re%61ltime")
    assert not is_websocket_route(b"/v1/re%2561ltime")
    assert not is_websocket_route(b"/v1//realtime")
