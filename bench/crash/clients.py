"""The agents of the crash test: many at once, streaming and not; each notes the answers whose end it saw.

An end is seen with the last choice's finish chunk of a stream, or with the last byte of a whole answer: what
an agent acts on. Nothing after it is waited for.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp

PAUSE_SEC = 0.01  # after a failed call


@dataclass(slots=True)
class Seen:
    """What the clients of one log know, by call ("EPISODE/TURN")."""

    sent: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    running: dict[str, float] = field(default_factory=dict)
    """Since when (monotonic), for those on the way."""
    cut: dict[str, float] = field(default_factory=dict)
    """How long calls had been on the way when their proxy was killed."""

    def killed(self, *, could_write: bool) -> None:
        """Call right after a kill, before anything else can happen.

        `could_write` False: the database was down, so that no row can be expected of those on the way.
        """
        now = time.monotonic()
        self.cut.update((call, now - since if could_write else 0.0) for call, since in self.running.items())


@dataclass(slots=True)
class Target:
    """Where the clients find the proxy; None: there is none just now."""

    url: str | None = None


async def agent(session: aiohttp.ClientSession, target: Target, seen: Seen, name: str) -> None:
    """One call after the other until cancelled: every second one streamed, every third with two choices."""
    number = 0
    while True:
        url = target.url
        if url is None:
            await asyncio.sleep(PAUSE_SEC)
            continue
        episode, turn = f"{name}.{number // 8}", number % 8
        call = f"{episode}/{turn}"
        number += 1
        seen.sent.add(call)
        seen.running[call] = time.monotonic()
        try:
            await _ask(
                session, url, episode, call, seen, is_streamed=number % 2 == 0, n=2 if number % 3 == 0 else 1
            )
        except (aiohttp.ClientError, OSError, TimeoutError):
            await asyncio.sleep(PAUSE_SEC)
        finally:
            seen.running.pop(call, None)


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    episode: str,
    call: str,
    seen: Seen,
    *,
    is_streamed: bool,
    n: int,
) -> None:
    messages = [{"role": "system", "content": f"You are {episode}. " * 20}, {"role": "user", "content": call}]
    body = {"model": "policy", "messages": messages, "n": n, "stream": is_streamed, "temperature": 1.0}
    headers = {"X-Lightning-Episode": episode, "X-Lightning-Agent": call}
    async with session.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            await asyncio.sleep(PAUSE_SEC)
            return
        if not is_streamed:
            doc = json.loads(await answer.read())
            if all(choice["finish_reason"] for choice in doc["choices"]):
                seen.delivered.add(call)
            return
        missing = n
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            missing -= sum(choice["finish_reason"] is not None for choice in choices)
            if missing == 0:
                seen.delivered.add(call)
                missing = -1
