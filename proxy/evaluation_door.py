"""The door through which an evaluation's calls reach a version that serves nobody else.

A listener of its own on loopback, open while the command runs, and a key that only the command is given. So
the version needs no name that others could ask for, and it makes no difference which worker publishes.
Behind it is the ordinary relay: calls are recorded, in episodes whose purpose is `eval`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from ..records import PolicyVersion, new_id
from ..store.keys import EpisodeKey
from .dialects.hop import Hop
from .incoming import Parts
from .live.policies import LivePolicies
from .live.trial import TrialPolicies
from .publishing.evaluation import Door
from .relay import Relay
from .transport.client import Receive, Scope, Send
from .transport.inner_server import InnerServer

MakeRelay = Callable[[Parts, str, "NoKeys"], tuple[Relay, Hop]]


class NoKeys:
    """Nobody comes in by an episode's key. Follows `relay.Keys`."""

    async def find(self, keys: Sequence[bytes]) -> EpisodeKey | None:
        return None


@contextlib.asynccontextmanager
async def open_door(  # noqa: PLR0917 - what the app has at hand
    parts: Parts,
    live: LivePolicies,
    make_relay: MakeRelay,
    finish: Callable[[str], Awaitable[None]],
    version: PolicyVersion,
    model: str,
) -> AsyncIterator[Door]:
    """`model`: the engine's name of the version. When the block ends, so do the calls that still run; then
    `finish` is told of the episode of those that named none."""
    key = secrets.token_urlsafe(32)
    episode = f"eval-{version.policy}-{version.version}-{new_id()[-8:]}"
    trial = TrialPolicies(live, version.policy, version.version, model)
    relay, hop = make_relay(
        replace(parts, live=trial, inference=None, evaluation_episode=episode), key, NoKeys()
    )
    running: set[asyncio.Task[None]] = set()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server runs each request in a task"
        running.add(task)
        try:
            await relay(scope, receive, send)
        finally:
            running.discard(task)

    server = InnerServer(serve, http="httptools", server_header=False, date_header=False)
    try:
        yield Door(server.url() + "/v1", key, episode)
    finally:
        await server.stop()
        left = [*running]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await hop.stop()
        await finish(episode)
