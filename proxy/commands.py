"""`lightning proxy …`: start the proxy."""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ..errors import SettingsError, UserError

if TYPE_CHECKING:
    import sqlalchemy as sa
    import uvicorn

    from ..settings.proxy import ProxySettings
    from .app import ProxyApp

app = typer.Typer(name="proxy", help="The recording proxy in front of the engine.", no_args_is_help=True)

KEEP_ALIVE_SEC = 75


@app.callback()
def _group() -> None:
    pass


@app.command()
def serve(  # noqa: PLR0917 - a parameter per flag
    config: Annotated[Path | None, typer.Option(help="TOML file with settings (configs/proxy.toml).")] = None,
    db: Annotated[str | None, typer.Option(help="Database URL of the log.")] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-url", "--engine", help="Root URL of vLLM, without /v1; repeat it for several engines."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name of the policy being trained.")] = None,
    durability: Annotated[str | None, typer.Option(help="commit or write-behind.")] = None,
    recording: Annotated[str | None, typer.Option(help="required or best-effort.")] = None,
    publish: Annotated[
        bool | None, typer.Option("--publish/--no-publish", help="Whether to load new policy versions.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port and the log.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    engine_check: Annotated[
        bool,
        typer.Option(
            "--engine-check/--no-engine-check",
            help="Whether the engine must answer at start; without, calls get 503 until it does.",
        ),
    ] = True,
) -> None:
    """Relay and record: agents use the address that is printed as their base URL.

    The proxy's token and the engine's key come from LIGHTNING_PROXY_TOKEN and LIGHTNING_PROXY_ENGINE_API_KEY,
    not from flags, which other users of the machine could read.
    """
    from ..settings.proxy import ProxySettings

    settings = ProxySettings.load(
        config,
        db=db,
        engine_url=engine_url or None,
        host=host,
        port=port,
        policy=policy,
        durability=durability,
        recording=recording,
        publish=publish,
        workers=workers,
        log_level=log_level,
    )
    _require_token(settings)
    run(settings, checks_engine=engine_check)


def run(settings: ProxySettings, *, checks_engine: bool) -> None:
    """Open the log, find the engine, listen, serve until a signal, drain."""
    import asyncio

    from .engine_watch import require_engine
    from .oddities import oddities
    from .publishing.evaluation import check_command
    from .workers import Workers

    _set_up_logging(settings.log_level)
    listener = _listen(settings.host, settings.port)

    def say_ready() -> None:
        typer.echo(f"ready: set OPENAI_BASE_URL={base_url(listener)}")

    try:
        _require_other_address(settings, listener)
        if settings.evaluation is not None and settings.publish:
            check_command(settings.evaluation.command)
        policies = _known_policies(settings)  # the log's mistakes come first, and once
        if checks_engine:
            models = asyncio.run(require_engine(settings))
            for line in oddities(settings, models, policies, os.environ):
                logging.getLogger("lightning.proxy").warning("%s", line)
        serve = serve_on if checks_engine else serve_at_once
        if settings.workers == 1:
            serve(settings, listener, say_ready)
        else:
            Workers(settings, listener, serve).run(say_ready)
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()


def serve_at_once(settings: ProxySettings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """As `serve_on`, and ready whether or not an engine is there."""
    serve_on(settings, listener, on_ready, needs_engine=False)


def serve_on(
    settings: ProxySettings,
    listener: socket.socket,
    on_ready: Callable[[], None],
    *,
    needs_engine: bool = True,
) -> None:
    """One proxy process on a socket that listens already, until a signal."""
    from ..store.database import Database
    from .app import ProxyApp
    from .idle import end_idle_episodes
    from .readiness import tell_stalls
    from .serving import serve_policies

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # uvicorn raises the signal that ended it once more: SIGTERM must not end us before the database is
    # closed.
    signal.signal(signal.SIGTERM, interrupt)
    _set_up_logging(settings.log_level)
    database = Database.open(settings.db)
    proxy = ProxyApp(settings, database, background=[serve_policies, end_idle_episodes, tell_stalls])
    try:
        _make_server(proxy, on_ready, needs_engine=needs_engine).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn has drained by now, and raises the signal again
    finally:
        proxy.recorder.close()  # a second Ctrl-C has skipped the shutdown, not what the log is owed
        database.close()


def _make_server(proxy: ProxyApp, on_ready: Callable[[], None], *, needs_engine: bool) -> uvicorn.Server:
    import asyncio

    import uvicorn

    from .readiness import when_ready

    config = uvicorn.Config(
        proxy,
        http="httptools",
        loop="uvloop",
        ws="websockets-sansio",
        ws_max_size=proxy.settings.max_body_mb * 1024 * 1024,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_SEC,
        timeout_graceful_shutdown=proxy.settings.drain_timeout_sec,
        backlog=2048,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _settle_memory()
            if needs_engine:
                self._readiness = asyncio.create_task(when_ready(proxy, on_ready))
            else:
                on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if needs_engine:
                self._readiness.cancel()
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            is_second, running = self.should_exit, proxy.gate.in_flight
            super().handle_exit(sig, frame)  # before a word is said: the second signal may come meanwhile
            if is_second:
                self.force_exit = True  # uvicorn does so on SIGINT only
                # What is cut off ends in errors of the server's; that it was cut off is all there is to say.
                for name in ("uvicorn.error", "asyncio"):
                    logging.getLogger(name).disabled = True
                typer.echo("stopped; calls that were cut off are recorded as aborted", err=True)
            elif running:
                typer.echo(f"finishing {running} running calls; a second signal cuts them off", err=True)

    return Server(config)


def _settle_memory() -> None:
    """What is there by now stays: the collector need not look through it again and again.

    An answer of a hundred tokens is hundreds of short-lived objects without a cycle: at the threshold that
    Python starts with, every other call would begin a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/v1"


def _listen(host: str, port: int) -> socket.socket:
    """The socket is ours before anything else is opened: a port in use is the commonest mistake."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"can't listen on {host}:{port}: {error.strerror}; choose another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        steps = {
            errno.EADDRINUSE: "end what is there or choose another --port",
            errno.EACCES: "choose a --port above 1023",
        }
        step = steps.get(error.errno or 0, "choose another --host")
        raise UserError(f"can't listen on {host}:{port}: {error.strerror}; {step}") from None
    return listener


def _known_policies(settings: ProxySettings) -> list[str]:
    from ..store.database import Database
    from ..store.policies import policy_names

    database = Database.open(settings.db)
    try:
        with database.read() as conn:
            if settings.publish and settings.canary_share > 0:
                _require_adapters(conn)
            return policy_names(conn)
    finally:
        database.close()


def _require_adapters(conn: sa.Connection) -> None:
    from ..records import VersionStatus, WeightsKind
    from ..store.policies import WAITING, versions_with_status

    for row in versions_with_status(conn, VersionStatus.LIVE, *WAITING):
        if row.kind is WeightsKind.FULL:
            raise SettingsError(
                f"setting 'canary_share': version {row.version} of {row.policy!r} is full weights, which "
                "can't serve a share of the episodes; train adapters, or leave it out"
            )


def _require_other_address(settings: ProxySettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    for url in settings.engine_url:
        parts = urlsplit(url)
        if parts.port == port and parts.hostname in (host, settings.host, "127.0.0.1", "localhost", "::1"):
            raise UserError(f"engine_url {url} is the address of this proxy; give vLLM's, or another --port")


def _require_token(settings: ProxySettings) -> None:
    if settings.token is not None and not settings.token.get_secret_value().strip():
        raise SettingsError("setting 'token' is empty; leave it out or set a secret")
    if settings.token is None and not _is_loopback(settings.host):
        raise SettingsError(
            f"listening on {settings.host} without a token would let anybody use the engine; "
            "set LIGHTNING_PROXY_TOKEN, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _NotOurBreaks(logging.Filter):
    """A stream that the engine broke is broken for the client too, and at the end of a shutdown calls are cut
    off: on purpose, so no errors of the app."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (
            record.exc_info
            and record.exc_info[0] is not None
            and "CancelledError" in record.exc_info[0].__name__
        ):
            return False
        return "returned without completing response" not in str(record.msg)


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("uvicorn.error").addFilter(_NotOurBreaks())
    for name in ("uvicorn", "asyncio", "alembic"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
