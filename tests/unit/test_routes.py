"""The allow-list: public routes pass, administration never does, however it is spelled."""

from __future__ import annotations

import pytest

from lightning_rl.proxy.routes import find_route

ADMIN = [
    b"/collective_rpc",
    b"/pause",
    b"/resume",
    b"/sleep",
    b"/wake_up",
    b"/update_weights",
    b"/init_weight_transfer_engine",
    b"/weight_checker",
    b"/reset_prefix_cache",
    b"/start_profile",
    b"/server_info",
    b"/scale_elastic_ep",
    b"/abort_requests",
    b"/v1/load_lora_adapter",
    b"/v1/unload_lora_adapter",
]


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        (b"/v1/chat/completions", "chat"),
        (b"/v1/completions", "completions"),
        (b"/v1/responses", "responses"),
        (b"/v1/messages", "messages"),
        (b"/inference/v1/generate", "other"),
        (b"/v1/models", None),
        (b"/tokenize", None),
        (b"/v1/embeddings", None),
        (b"/v1/responses/resp_12-ab", None),
        (b"/v1/responses/resp_1/cancel", None),
    ],
)
def test_public_routes(path: bytes, dialect: str | None) -> None:
    route = find_route(path)
    assert route is not None
    assert route.dialect == dialect


def test_the_engine_decodes_a_path_once_and_so_do_we() -> None:
    route = find_route(b"/v1/ch%61t/completions")
    assert route is not None
    assert route.path == "/v1/chat/completions"
    assert find_route(b"/v1/ch%2561t/completions") is None


def spellings(path: bytes) -> list[bytes]:
    name = path.rsplit(b"/", 1)[1]
    encoded = b"".join(b"%%%02x" % char for char in name)
    return [
        path,
        path.replace(name, encoded),
        path.replace(name, encoded.upper()),
        path.replace(b"/", b"%2f"),
        path.replace(name, b"".join(b"%%25%02x" % char for char in name)),
        b"/" + path,
        path + b"/",
        path + b"//",
        b"/." + path,
        b"/v1/.." + path,
        b"/v1/models/.." + path,
        b"/v1/responses/.." + path,
        b"/v1/responses/x/../.." + path,
        path.upper(),
        path.title(),
        path + b";x=1",
        path + b"%00",
        path + b"%20",
        path.replace(b"/", b"\\"),
        b"/v1/models%2f.." + path,
    ]


@pytest.mark.parametrize("path", ADMIN)
def test_admin_routes_never_pass(path: bytes) -> None:
    for spelled in spellings(path):
        assert find_route(spelled) is None, spelled


@pytest.mark.parametrize(
    "path", [b"", b"/", b"/v1", b"/v1/", b"/v1/nope", b"//v1/models", b"/v1/models/", b"/v1/models/x"]
)
def test_what_the_engine_does_not_have(path: bytes) -> None:
    assert find_route(path) is None
