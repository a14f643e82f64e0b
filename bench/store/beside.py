"""One program beside the proxies on their log: a reward writer, or a trainer that reads.

    python beside.py ROLE DATABASE SECONDS OUT

OUT gets one JSON document: how often, the ids of the rewards that were acknowledged, every failure.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from lightning_rl.errors import LightningError
from lightning_rl.records import Reward, RewardTarget, new_id, now_ms
from lightning_rl.store.append import add_reward
from lightning_rl.store.database import Database
from lightning_rl.store.listing import EpisodeFilter, list_episodes
from lightning_rl.store.read import load_episodes
from lightning_rl.store.selection import count_groups, trainable_group_ids

REWARDS_PER_LOOK = 20


def work(role: str, database: Database, deadline: float) -> dict[str, Any]:
    done: dict[str, Any] = {"role": role, "turns": 0, "rewards": [], "failures": []}
    turn = write_rewards if role == "rewards" else read_a_step
    while time.monotonic() < deadline:
        try:
            turn(database, done)
        except LightningError as error:
            done["failures"].append(str(error))
        done["turns"] += 1
    return done


def write_rewards(database: Database, done: dict[str, Any]) -> None:
    with database.read() as conn:
        names = [row.id for row in list_episodes(conn, EpisodeFilter(), limit=64).rows]
    if not names:
        time.sleep(0.1)
    for name in random.choices(names, k=REWARDS_PER_LOOK) if names else ():
        reward = Reward(
            id=new_id(),
            episode_id=name,
            target=RewardTarget.EPISODE,
            value=random.random(),
            source=f"writer-{random.randrange(8)}",
            created_at_ms=now_ms(),
        )
        with database.write() as conn:
            add_reward(conn, reward)
        done["rewards"].append(reward.id)
        time.sleep(0.005)


def read_a_step(database: Database, done: dict[str, Any]) -> None:
    with database.read() as conn:
        trainable_group_ids(conn, policy="policy", run_id="run")
        count_groups(conn, policy="policy", run_id="run")
        names = [row.id for row in list_episodes(conn, EpisodeFilter(), limit=64).rows]
        load_episodes(conn, names)
    time.sleep(0.05)


if __name__ == "__main__":
    opened = Database.open(sys.argv[2])
    try:
        found = work(sys.argv[1], opened, time.monotonic() + float(sys.argv[3]))
    finally:
        opened.close()
    Path(sys.argv[4]).write_text(json.dumps(found))
