"""Ends episodes that have gone quiet, for agents that never say that they are done.

A background task of the proxy; several proxies on one log may run it, since each ending looks again under the
episode's lock. Whether an episode is idle is the log's to say (store/curation.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..errors import StoreError, UnknownEpisodeError
from ..records import now_ms
from ..store.curation import end_if_idle, idle_episodes
from ..store.database import Database

if TYPE_CHECKING:
    from .app import ProxyApp

LOOKS_PER_TIMEOUT = 10
LONGEST_WAIT_SEC = 60.0

logger = logging.getLogger("lightning.idle")


def end_idle(database: Database, idle_timeout_sec: float) -> list[str]:
    """One look: the episodes that were ended. A transaction for each, so that no writer waits for long."""
    idle_ms, at_ms = int(idle_timeout_sec * 1000), now_ms()
    with database.read() as conn:
        found = idle_episodes(conn, idle_ms=idle_ms, at_ms=at_ms)
    ended = []
    for name in found:
        try:
            with database.write() as conn:
                if end_if_idle(conn, name, idle_ms=idle_ms, at_ms=at_ms):
                    ended.append(name)
        except UnknownEpisodeError:
            continue  # deleted meanwhile
    return ended


async def end_idle_episodes(app: ProxyApp) -> None:
    """Look again and again, until cancelled; nothing to do where no time-out is set."""
    timeout_sec = app.settings.idle_timeout_sec
    if timeout_sec is None:
        return
    while True:
        await asyncio.sleep(min(timeout_sec / LOOKS_PER_TIMEOUT, LONGEST_WAIT_SEC))
        try:
            await app.recorder.flush()  # a call that this proxy has taken is no silence
            ended = await asyncio.to_thread(end_idle, app.database, timeout_sec)
        except StoreError as error:
            logger.warning("idle episodes were not ended, trying again: %s", error)
            continue
        for name in ended:
            app.live.end_episode(name)
            app.engines.end_episode(name)
            app.lineage.forget(name)
        if ended:
            logger.info("%d episodes had no call for %g s and have ended", len(ended), timeout_sec)
