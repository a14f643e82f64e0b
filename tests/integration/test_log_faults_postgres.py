"""The proxy while its Postgres is away: crashed, restarting, or with every connection cut."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.fault_checks import call, check_best_effort, check_loss_is_counted, check_required, until
from fakes.postgres_server import PostgresMissingError, PostgresServer
from fakes.running_proxy import running_proxy

from lightning_rl.proxy import recorder

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    try:
        running = PostgresServer()
    except PostgresMissingError as error:
        pytest.skip(str(error))
    with running:
        yield running


@pytest.fixture(autouse=True)
def _up(server: PostgresServer) -> None:
    if server.process is None:  # a failed test has left it down
        server.start()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
@pytest.mark.parametrize("check", [check_required, check_best_effort])
def test_the_proxy_goes_on_by_itself_when_the_server_is_back(
    tmp_path: Path, server: PostgresServer, check: Callable[..., None], sign: signal.Signals
) -> None:
    mode = "required" if check is check_required else "best-effort"
    with running_proxy(tmp_path, db=server.new_database(), recording=mode) as running:
        check(running, lambda: server.stop(sign), server.start, "hello")


def test_what_is_lost_meanwhile_is_counted(
    tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED", 4)
    monkeypatch.setattr(recorder, "LAST_RETRY_SEC", 0.2)
    with running_proxy(tmp_path, db=server.new_database(), recording="best-effort") as running:
        check_loss_is_counted(running, lambda: server.stop(signal.SIGQUIT), server.start, "hello")


def test_connections_that_were_cut_are_replaced(tmp_path: Path, server: PostgresServer) -> None:
    with running_proxy(tmp_path, db=server.new_database()) as running:
        for number in range(1, 4):
            assert call(running).status == 200
            with running.database.engine.connect() as conn:
                conn.execute(
                    sa.text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )
            until(lambda number=number: len(running.rows("calls")) == number, "a call is missing")
        assert call(running).status == 200
        assert running.proxy.recorder.fault is None
