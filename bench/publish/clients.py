"""The agents of the bench: streams that know a base URL, play short episodes, and note how each call went.

A call has failed when its answer is not 200, breaks off, or ends without a finish reason. Nothing is asked
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

CALLS_PER_EPISODE = 2
SUBJECTS = (
    "mules",
    "glass tubes",
    "a hut at three thousand metres",
    "storms",
    "pencils",
    "a train of 12 wagons",
)
PREFACE = (
    "You write about mountains, the weather, and the people who measure both. They carried their glass tubes "
    "on mules, wrote the numbers into small books, and argued about them for thirty years. "
) * 4
"""Longer than a block of the prefix cache (128 tokens on a CPU): calls share cached keys and values."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One call as its client saw it. `error` None: a whole answer, of that id."""

    call_id: str | None
    episode: str
    error: str | None
    began: float  # monotonic
    ended: float


@dataclass
class Clients:
    """`url`: of the proxy that is there now (None: there is none; the clients wait)."""

    url: str | None
    num_streams: int = 32
    max_tokens: int = 24
    pause_sec: float = 0.05
    name: str = "e"
    heard: list[Heard] = field(default_factory=list)
    num_running: int = 0

    @property
    def failed(self) -> list[Heard]:
        return [one for one in self.heard if one.error is not None]

    @property
    def call_ids(self) -> list[str]:
        return [one.call_id for one in self.heard if one.error is None and one.call_id is not None]

    def by_episode(self) -> dict[str, list[str]]:
        """Ids of answered calls by episode, in their order."""
        found: dict[str, list[str]] = {}
        for one in self.heard:
            if one.error is None and one.call_id is not None:
                found.setdefault(one.episode, []).append(one.call_id)
        return found

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Streams one call after the other; on the way out each ends the call that it has begun."""
        stop = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:
            tasks = [
                asyncio.create_task(self._stream(http, number, stop)) for number in range(self.num_streams)
            ]
            try:
                yield
            finally:
                stop.set()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for fault in ended:
            if isinstance(fault, BaseException):
                raise fault

    async def ask_some(self, number: int) -> list[str]:
        """So many calls at once, after all that went before; ids of those that were answered."""
        before = len(self.heard)
        async with httpx.AsyncClient(timeout=300) as http:
            names = [f"{self.name}-some-{before}-{i}" for i in range(number)]
            await asyncio.gather(*(self._call(http, name, 0) for name in names))
        return [one.call_id for one in self.heard[before:] if one.call_id is not None and one.error is None]

    async def more(self, number: int, timeout_sec: float = 120) -> None:
        """Wait for so many more answers."""
        wanted = len(self.heard) + number
        async with asyncio.timeout(timeout_sec):
            while len(self.heard) < wanted:  # noqa: ASYNC110 - of other tasks' making
                await asyncio.sleep(0.02)

    async def _stream(self, http: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        turn = 0
        while not stop.is_set():
            if self.url is None:
                await asyncio.sleep(0.05)
                continue
            await self._call(http, f"{self.name}-{number}-{turn // CALLS_PER_EPISODE}", turn)
            turn += 1
            await asyncio.sleep(self.pause_sec)

    async def _call(self, http: httpx.AsyncClient, episode: str, turn: int) -> None:
        began, call_id, error = time.monotonic(), None, "no finish reason"
        subject = SUBJECTS[hash((episode, turn)) % len(SUBJECTS)]
        body = {
            "model": "gpt-4o",
            "messages": [
                {"role": "system", "content": PREFACE},
                {"role": "user", "content": f"Tell me about {subject}, {episode}."},
            ],
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "stream": True,
        }
        self.num_running += 1
        try:
            url = f"{self.url}/episodes/{episode}/v1/chat/completions"
            async with http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    error = f"{answer.status_code} {(await answer.aread()).decode()[:200]}"
                else:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            chunk = json.loads(line[6:])
                            call_id = chunk.get("id", call_id)
                            if chunk.get("choices") and chunk["choices"][0].get("finish_reason"):
                                error = None
        except httpx.HTTPError as fault:
            error = f"{type(fault).__name__}: {fault}"
        finally:
            self.num_running -= 1
        self.heard.append(Heard(call_id, episode, error, began, time.monotonic()))
