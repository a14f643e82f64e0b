"""A real Postgres server for tests: a fresh cluster in a temporary folder, loopback only, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self


class PostgresMissingError(Exception):
    """The reason why no server can be started here."""


def programs() -> Path:
    """Folder of initdb and postgres. Raises PostgresMissingError."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    on_path = shutil.which("initdb")
    if on_path:
        found.append(Path(on_path).resolve().parent)
    for folder in reversed(found):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise PostgresMissingError("no PostgreSQL server programs (initdb, postgres) on this machine")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _server_user() -> dict[str, int]:
    """Postgres refuses to run as root: who runs it then, as arguments of subprocess."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid}
    raise PostgresMissingError("running as root without a user postgres or nobody to run the server as")


class PostgresServer:
    """`with PostgresServer() as server: server.new_database()` -> a URL with an empty database behind it."""

    def __init__(self) -> None:
        self.bin = programs()
        self.user = _server_user()
        self.folder = Path(tempfile.mkdtemp(prefix="lightning-pg-"))
        if self.user:
            os.chown(self.folder, self.user["user"], self.user["group"])
        self.cluster = self.folder / "cluster"
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.databases = 0

    def __enter__(self) -> Self:
        try:
            self._run(
                "initdb",
                "-D",
                str(self.cluster),
                "-U",
                "lightning",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--no-locale",
                "-N",
            )
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(signal.SIGINT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server on its cluster and wait until it takes connections."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    str(self.bin / "postgres"),
                    *("-D", str(self.cluster), "-p", str(self.port), "-k", ""),
                    *(
                        "-c",
                        "listen_addresses=127.0.0.1",
                        "-c",
                        "shared_buffers=32MB",
                        "-c",
                        "max_connections=100",
                    ),
                ],
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,  # Ctrl-C in the terminal is for pytest, which then stops the server
                user=self.user.get("user"),
                group=self.user.get("group"),
            )
        deadline = time.monotonic() + 120  # after a crash it syncs every file of every database first
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"Postgres did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self, sign: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: at once but in good order. SIGQUIT: as in a crash."""
        if self.process is not None:
            self.process.send_signal(sign)
            self.process.wait(timeout=30)
            self.process = None

    def url(self, database: str) -> str:
        return f"postgresql://lightning:secret@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        self.databases += 1
        name = f"log{self.databases}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "lightning", name)
        return self.url(name)

    def _ready(self) -> bool:
        command = [str(self.bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(
            command,
            user=self.user.get("user"),
            group=self.user.get("group"),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{program} failed:\n{done.stdout}{done.stderr}"
