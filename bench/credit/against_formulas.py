"""Random episode sets through every rule and through an independent computation of its formula.

`independent.py` was written by somebody who had docs/credit.md and nothing else; it takes plain dictionaries.
What both say of each call (a number, or no advantage) is compared here.
"""

from __future__ import annotations

import random
from typing import Any

from independent import advantages

from lightning_rl.records import (
    Call,
    CallKind,
    CallStatus,
    Choice,
    Episode,
    EpisodeStatus,
    Purpose,
    logprobs,
    token_ids,
)
from lightning_rl.trainer.credit.base import (
    CreditContext,
    JudgedEpisode,
    JudgedGroup,
    PartRewards,
    PastEpisode,
)
from lightning_rl.trainer.credit.registry import RULES, configure

OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "lightning": ({}, {"std": "population"}, {"std": "none"}),
    "grpo": ({}, {"eps": 1e-4}, {"std": "population", "eps": 1e-8}),
    "turn_discount": ({}, {"gamma": 0.5, "std": "none"}),
    "reinforce_pp": ({}, {"gamma": 0.8}),
    "running_baseline": ({}, {"decay": 0.5, "key": "task", "min_history": 1}),
    "gigpo": ({}, {"omega": 0.5, "gamma": 1.0, "std": "none"}, {"call_rewards": False}),
    "hgpo": ({}, {"depth": 1, "alpha": 0.0}, {"depth": 3, "episode_weight": 0.5}),
    "step_gae": ({}, {"whiten": "none", "gamma": 1.0, "lam": 0.5}, {"whiten": "episodes"}),
    "intermediate": ({}, {"compare": "group"}, {"gamma": 0.9, "std": "none"}),
    "dr_mas": ({}, {"agent_rewards": "add"}, {"agent_rewards": "ignore"}),
    "sr_ppo": ({}, {"n": 4}),
}
_REWARDS = ((0.0, 1.0), (0.0, 0.25, 0.5, 1.0), (-1.0, 0.3, 2.0))


def largest_difference(num_sets: int, *, seed: int = 0) -> float:
    """Over all sets, rules and options. AssertionError where only one of the two gives an advantage."""
    random_ = random.Random(seed)
    worst = 0.0
    for number in range(num_sets):
        step = random_step(random_)
        for rule in RULES:
            choices = OPTIONS.get(rule, ({},))
            options = choices[number % len(choices)]
            if rule == "sr_ppo" and not _is_bounded(step):
                continue
            ours, theirs = (
                _ours(rule, options, step),
                advantages(rule, options, step["groups"], step["history"]),
            )
            assert ours.keys() == theirs.keys(), (rule, options, ours.keys() ^ theirs.keys())
            for call, mine in ours.items():
                other = theirs[call]
                if mine is None or other is None:
                    assert mine is other, (rule, options, number, call, mine, other)
                else:
                    worst = max(worst, abs(mine - other))
    return worst


def random_step(random_: random.Random) -> dict[str, Any]:
    """Up to four groups of up to six episodes of up to five calls, two agents, few states, some rewards of
    calls and agents, some episodes set aside, some calls without a critic's value."""
    values = random_.choice(_REWARDS)
    groups = [_group(random_, g, values) for g in range(random_.randint(1, 4))]
    history = [
        {
            "id": f"p{i}",
            "task": f"t{random_.randrange(4)}",
            "ended_at_ms": random_.randrange(6),
            "reward": random_.choice(values),
        }
        for i in range(random_.randrange(8))
    ]
    return {"groups": groups, "history": history}


def _group(random_: random.Random, g: int, values: tuple[float, ...]) -> dict[str, Any]:
    judged_calls = random_.random() < 0.5
    judged_agents = random_.random() < 0.4
    episodes = []
    for e in range(random_.randint(1, 6)):
        name = f"g{g}e{e}"
        calls = [
            {
                "id": f"{name}c{k}",
                "agent": random_.choice(("planner", "writer")),
                "state": random_.choice("xyz"),
                "reward": random_.choice((0.5, 1.0)) if judged_calls and random_.random() < 0.3 else None,
                "value": None if k and random_.random() < 0.1 else round(random_.random(), 3),
            }
            for k in range(random_.randint(1, 5))
        ]
        agents = sorted({call["agent"] for call in calls})
        episodes.append(
            {
                "id": name,
                "reward": random_.choice(values),
                "set_aside": random_.random() < 0.15,
                "ended_at_ms": random_.randrange(6),
                "calls": calls,
                "agent_rewards": {a: random_.choice(values) for a in agents} if judged_agents else {},
            }
        )
    return {"id": f"g{g}", "task": f"t{g}", "calls_are_judged": judged_calls, "episodes": episodes}


def _is_bounded(step: dict[str, Any]) -> bool:
    return all(0.0 <= e["reward"] <= 1.0 for group in step["groups"] for e in group["episodes"])


def _ours(rule: str, options: dict[str, Any], step: dict[str, Any]) -> dict[str, float | None]:
    groups = [
        JudgedGroup(
            group["id"], group["task"], tuple(_judged(group, episode) for episode in group["episodes"])
        )
        for group in step["groups"]
    ]
    values = {
        call["id"]: call["value"]
        for group in step["groups"]
        for episode in group["episodes"]
        for call in episode["calls"]
        if call["value"] is not None
    }
    # The log holds the step's own episodes, too.
    own = [
        {**episode, "task": group["task"]}
        for group in step["groups"]
        for episode in group["episodes"]
        if not episode["set_aside"]
    ]
    history = [
        PastEpisode(past["id"], past["task"], {}, past["ended_at_ms"], past["reward"])
        for past in [*step["history"], *own]
    ]
    given = configure({"rule": rule, **options}).assign(groups, CreditContext(values, history))
    found: dict[str, float | None] = {}
    for group in groups:
        for judged in group.episodes:
            for call in judged.episode.calls:
                credit = given.get((call.id, 0))
                found[call.id] = None if credit is None else credit.advantage
    return found


def _judged(group: dict[str, Any], episode: dict[str, Any]) -> JudgedEpisode:
    calls = tuple(_call(episode["id"], k, call) for k, call in enumerate(episode["calls"]))
    made = Episode(
        id=episode["id"],
        task_id=group["task"],
        group_id=group["id"],
        purpose=Purpose.TRAIN,
        status=EpisodeStatus.ENDED,
        created_at_ms=0,
        ended_at_ms=episode["ended_at_ms"],
        tags={},
        calls=calls,
        rewards=(),
    )
    judge = frozenset({"judge"})
    parts = PartRewards(
        calls={call["id"]: call["reward"] for call in episode["calls"] if call["reward"] is not None},
        call_sources=judge if group["calls_are_judged"] else frozenset(),
        agents=episode["agent_rewards"],
        agent_sources=dict.fromkeys(episode["agent_rewards"], judge),
    )
    return JudgedEpisode(made, episode["reward"], (), "failed" if episode["set_aside"] else None, parts)


def _call(episode: str, ordinal: int, call: dict[str, Any]) -> Call:
    choice = Choice(call["id"], 0, token_ids([1]), logprobs([-1.0]), "stop", None, None)
    return Call(
        id=call["id"],
        episode_id=episode,
        ordinal=ordinal,
        agent=call["agent"],
        kind=CallKind.POLICY,
        parent_call_id=None,
        state_key=call["state"],
        policy="policy",
        policy_version=0,
        policy_version_end=0,
        status=CallStatus.COMPLETE,
        delivered=True,
        fingerprint_id=None,
        sampling={},
        prompt_ids=token_ids([1]),
        choices=(choice,),
    )
