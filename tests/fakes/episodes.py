"""Small records for trainer tests: calls, episodes and groups with as little said as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_rl.records import (
    Call,
    CallKind,
    CallStatus,
    Choice,
    Episode,
    EpisodeStatus,
    Group,
    Purpose,
    Quarantine,
    Reward,
    RewardTarget,
    Transition,
    logprobs,
    token_ids,
)
from lightning_rl.trainer.credit.base import JudgedEpisode, JudgedGroup, PartRewards


def choice(
    call_id: str,
    ids: Sequence[int],
    *,
    index: int = 0,
    quarantine: Quarantine | None = None,
    used: bool | None = None,
    behavior: Sequence[float] | None = None,
) -> Choice:
    values = [-1.0] * len(ids) if behavior is None else behavior
    return Choice(call_id, index, token_ids(ids), logprobs(values), "stop", quarantine, used)


def call(name: str, prompt: Sequence[int], completion: Sequence[int], **changes: Any) -> Call:
    made = Call(
        id=name,
        episode_id="",
        ordinal=0,
        agent=None,
        kind=CallKind.POLICY,
        parent_call_id=None,
        state_key=None,
        policy="policy",
        policy_version=0,
        policy_version_end=0,
        status=CallStatus.COMPLETE,
        delivered=True,
        fingerprint_id=None,
        sampling={},
        prompt_ids=token_ids(prompt),
        choices=(choice(name, completion),),
    )
    return replace(made, **changes)


def episode(
    name: str, reward: float | None = None, *, calls: Sequence[Call] = (), group: str = "g", **changes: Any
) -> Episode:
    rewards = () if reward is None else (Reward(f"r-{name}", name, RewardTarget.EPISODE, reward, "test", 0),)
    made = Episode(
        id=name,
        task_id="task",
        group_id=group,
        purpose=Purpose.TRAIN,
        status=EpisodeStatus.ENDED,
        created_at_ms=0,
        ended_at_ms=1,
        tags={},
        calls=tuple(replace(c, episode_id=name, ordinal=i) for i, c in enumerate(calls)),
        rewards=rewards,
    )
    return replace(made, **changes)


def group(name: str, episodes: Sequence[Episode]) -> Group:
    return Group(name, f"task-{name}", "", None, tuple(replace(e, group_id=name) for e in episodes))


def judged(
    values: Sequence[float | None],
    *,
    calls: Sequence[int] | None = None,
    choices: int = 1,
    set_aside: Mapping[int, str] | None = None,
) -> JudgedGroup:
    """A group of episodes e0, e1, … with calls e0-c0, e0-c1, …"""
    episodes = []
    for i, value in enumerate(values):
        names = [f"e{i}-c{k}" for k in range(1 if calls is None else calls[i])]
        made = episode(
            f"e{i}",
            calls=[
                call(n, [1], [2], choices=tuple(choice(n, [2], index=j) for j in range(choices)))
                for n in names
            ],
        )
        episodes.append(JudgedEpisode(made, value, (), (set_aside or {}).get(i)))
    return JudgedGroup("g", "task", tuple(episodes))


def played(
    name: str,
    value: float | None,
    states: Sequence[str] = ("s",),
    *,
    agents: Sequence[str | None] | None = None,
    rewards: Mapping[int, float] | None = None,
    sources: Sequence[str] = (),
    agent_rewards: Mapping[str, float] | None = None,
    set_aside: str | None = None,
    **changes: Any,
) -> JudgedEpisode:
    """A judged episode with a step per state; `rewards` by number of the step, from `sources`."""
    steps = [
        call(f"{name}-c{k}", [1], [2], state_key=state, agent=None if agents is None else agents[k])
        for k, state in enumerate(states)
    ]
    parts = PartRewards(
        calls={f"{name}-c{k}": reward for k, reward in (rewards or {}).items()},
        call_sources=frozenset(sources or (["judge"] if rewards else [])),
        agents=agent_rewards or {},
        agent_sources={agent: frozenset(["judge"]) for agent in agent_rewards or {}},
    )
    return JudgedEpisode(episode(name, calls=steps, **changes), value, (), set_aside, parts)


def judged_group(*episodes: JudgedEpisode, name: str = "g") -> JudgedGroup:
    return JudgedGroup(name, f"task-{name}", tuple(episodes))


def transition(
    name: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    behavior: Sequence[float] | None = None,
    temperature: float = 1.0,
    advantage: float = 1.0,
    multiplier: float = 1.0,
) -> Transition:
    values = [-1.0] * len(completion) if behavior is None else behavior
    return Transition(
        name,
        0,
        token_ids(prompt),
        token_ids(completion),
        logprobs(values),
        temperature,
        advantage,
        multiplier,
    )
