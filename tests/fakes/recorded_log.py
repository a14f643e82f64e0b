"""A log of groups of two-call episodes, played by a tiny model and written through the store."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from fakes import log_rows

from lightning_rl.store.append import append_entries, create_episode
from lightning_rl.store.database import Database
from lightning_rl.store.episodes import add_reward


def sample(model: Any, prompt: Sequence[int], num_tokens: int, seed: int) -> tuple[list[int], list[float]]:
    """Tokens drawn from the model at temperature 1, with their logprobs, as an engine records them."""
    generator = torch.Generator().manual_seed(seed)
    ids, values = list(prompt), []
    with torch.no_grad():
        for _ in range(num_tokens):
            distribution = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            values.append(float(distribution[token]))
            ids.append(token)
    return ids[len(prompt) :], values


def play_group(
    database: Database,
    model: Any,
    task: str,
    rewards: Sequence[float | None],
    *,
    batch: str = "b",
    intents: Mapping[str, Any] | None = None,
    tokens: Sequence[int] = (3, 2),
) -> list[str]:
    """One group, one episode per reward, each of two calls; None: no reward is given. Its episode ids."""
    rng = random.Random(task)
    question = [3, 4, *(rng.randrange(5, 60) for _ in range(5))]
    names = []
    for number, reward in enumerate(rewards):
        name = f"{task}-{batch}-{number}"
        names.append(name)
        with database.write() as conn:
            create_episode(conn, episode_id=name, task_id=task, batch=batch, expected_size=len(rewards))
        prompt = question
        for call_number, num_tokens in enumerate(tokens):
            call = f"{name}-{call_number}"
            ids, values = sample(
                model, prompt, num_tokens, seed=crc32(f"{task}-{number}-{call_number}".encode())
            )
            entries = [
                log_rows.intent(call, name, task=task, batch=batch, **(intents or {})),
                log_rows.end(call, prompt, log_rows.choice(ids, values)),
            ]
            with database.write() as conn:
                append_entries(conn, entries)
            prompt = [*prompt, *ids, 9, 10]
        with database.write() as conn:
            if reward is not None:
                add_reward(conn, log_rows.reward(name, reward, final=True))
    return names
