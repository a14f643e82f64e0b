"""Produce episodes: run the agent on tasks through the proxy, judge each attempt, hand in the reward.

The agent is told a base URL and nothing else; which episode it plays stands in that URL. All that is said to
the proxy beside the agent's own calls are two requests per episode, to its API under `/lightning/api/`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from agent import Reply, solve
from openai import AsyncOpenAI, OpenAIError
from tasks import Task, reward


@dataclass(slots=True)
class Produced:
    """What the agent's side knows of a batch; nothing of it comes from the log."""

    episode_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    num_calls: int = 0  # that the agent made, whether or not they succeeded
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def success(self) -> float:
        return sum(self.rewards) / max(1, len(self.rewards))


async def produce(
    proxy_url: str,
    tasks: Sequence[Task],
    *,
    batch: str,
    episodes_per_task: int = 1,
    purpose: str = "train",
    concurrency: int = 64,
    stream: bool = False,
) -> Produced:
    """Run every task `episodes_per_task` times; each (task, batch) is one group in the log."""
    produced = Produced()
    slots = asyncio.Semaphore(concurrency)
    began = time.monotonic()

    async with (
        aiohttp.ClientSession() as session,
        AsyncOpenAI(api_key="unused", max_retries=0, timeout=600) as client,
    ):

        async def post(path: str, **body: object) -> None:
            async with session.post(f"{proxy_url}/lightning/api/{path}", json=body) as answer:
                if answer.status >= 400:
                    raise RuntimeError(f"{path}: {answer.status} {await answer.text()}")

        async def attempt(task: Task, number: int) -> None:
            episode = f"{batch}-{task.id}-{number}"
            async with slots:
                await post(
                    "episodes",
                    episode=episode,
                    task=task.id,
                    batch=batch,
                    expected_size=episodes_per_task,
                    purpose=purpose,
                )
                produced.episode_ids.append(episode)
                produced.num_calls += 2
                try:
                    replies = await solve(
                        client.with_options(base_url=f"{proxy_url}/episodes/{episode}/v1"),
                        task.question,
                        stream=stream,
                    )
                except OpenAIError as error:
                    produced.errors.append(f"{episode}: {error}")
                    await post(f"episodes/{episode}/end", status="failed", note=str(error)[:200])
                    return
                value = reward(task, replies[-1].text)
                await post("rewards", episode=episode, value=value, source="exact-match", final=True)
            produced.replies.extend(replies)
            produced.rewards.append(value)

        await asyncio.gather(
            *(attempt(task, number) for task in tasks for number in range(episodes_per_task))
        )
    produced.seconds = time.monotonic() - began
    return produced
