"""What the publisher in the proxy does, without an engine: every version that waits goes live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rl.records import VersionStatus
from lightning_rl.store.database import Database
from lightning_rl.store.policies import set_version_status, versions_with_status

_LIVE = VersionStatus.LIVE


@contextmanager
def publishing(url: str) -> Iterator[list[int]]:
    """Gives the versions that went live, in the order of it."""
    published: list[int] = []
    over = threading.Event()

    def publish() -> None:
        database = Database.open(url)
        while not over.wait(0.02):
            with database.read() as conn:
                waiting = versions_with_status(conn, VersionStatus.CANDIDATE)
            for version in waiting:
                assert Path(str(version.path)).is_dir()
                with database.write() as conn:
                    set_version_status(
                        conn, version.policy, version.version, VersionStatus.LIVE, source="test"
                    )
                published.append(version.version)
        database.close()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield published
    finally:
        over.set()
        thread.join()
