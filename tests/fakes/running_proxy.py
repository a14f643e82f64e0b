"""The real proxy in front of a fake engine, with a real SQLite log, in this process."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fakes.fake_vllm import FakeVllm, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from lightning_rl.proxy.app import Background, ProxyApp
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.database import Database


@dataclass
class Running:
    engine: FakeVllm
    engine_url: str
    proxy: ProxyApp
    url: str
    database: Database

    def rows(self, table: str) -> list[dict[str, Any]]:
        with self.database.read() as conn:
            return [dict(row) for row in conn.exec_driver_sql(f"SELECT * FROM {table}").mappings()]


@contextlib.contextmanager
def running_proxy(
    tmp_path: Path,
    engine: FakeVllm | None = None,
    more: Sequence[Background] = (),
    drain_sec: int = 5,
    **settings: Any,
) -> Iterator[Running]:
    """`more`: background tasks beside the one that knows the base model."""
    engine = engine or FakeVllm()

    async def know_base(app: ProxyApp) -> None:
        app.live.set_base_model(engine.models[0])

    with serving(engine) as engine_url:
        database = Database.open(settings.pop("db", f"sqlite:///{tmp_path}/log.db"))
        chosen = ProxySettings.load(engine_url=engine_url, db=database.url, **settings)
        proxy = ProxyApp(chosen, database, background=[know_base, *more])
        try:
            with serving(
                proxy,
                lifespan="on",
                http="httptools",
                ws="websockets-sansio",
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=drain_sec,
            ) as url:
                yield Running(engine, engine_url, proxy, url, database)
        finally:
            database.close()


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    is_broken: bool = False  # the connection ended before the body did


def ask(
    root: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
) -> Answer:
    """One request over a connection of its own, as plain as it gets."""
    connection = http.client.HTTPConnection(urlsplit(root).netloc, timeout=30)
    try:
        sent = {"content-type": "application/json"} if body is not None else {}
        connection.request(method or ("GET" if body is None else "POST"), path, body, sent | (headers or {}))
        response = connection.getresponse()
        try:
            received, is_broken = response.read(), False
        except http.client.IncompleteRead as error:
            received, is_broken = error.partial, True
        return Answer(response.status, response.getheaders(), received, is_broken)
    finally:
        connection.close()


def refused_websocket(root: str, path: str, **headers: str) -> tuple[int, Any]:
    """The status and the JSON with which a handshake was refused."""
    try:
        connect("ws" + root.removeprefix("http") + path, additional_headers=headers, proxy=None)
    except InvalidStatus as refusal:
        body = bytes(refusal.response.body or b"")
        return refusal.response.status_code, json.loads(body) if body else None
    raise AssertionError(f"{path} was not refused")
