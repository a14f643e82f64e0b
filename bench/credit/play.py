"""A tiny model walks through the rooms; what comes out are the log's own records, as a trainer reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from world import LEVER, VOCABULARY, Task, Walk

from lightning_rl.records import (
    Call,
    CallKind,
    CallStatus,
    Choice,
    Episode,
    EpisodeStatus,
    Group,
    Purpose,
    Reward,
    RewardTarget,
    logprobs,
    token_ids,
)
from lightning_rl.trainer.steps import attention

EPISODES_PER_TASK = 8
_WARM_UP_STEPS = 150


def new_model(seed: int) -> Any:
    """Two layers that answer with one of the four levers, each as likely: a base model that knows the format
    and nothing else."""
    attention.register()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=16,
            bos_token_id=30,
            initializer_range=48**-0.5,  # the usual 0.02 is for models a hundred times as wide
            eos_token_id=31,
            pad_token_id=31,
            attn_implementation=attention.NAME,
        )
    ).float()
    _teach_format(model, random.Random(seed))
    return model


def tokenizer() -> Any:
    """The trainer wants one; nothing here is ever text."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w30")),
        unk_token="w30",
        pad_token="w31",
        eos_token="w31",
    )


def _teach_format(model: Any, random_: random.Random) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    wanted = torch.zeros(VOCABULARY)
    wanted[list(LEVER)] = 1 / len(LEVER)
    for _ in range(_WARM_UP_STEPS):
        prompts = [_anywhere(random_).prompt() for _ in range(64)]
        logits = model(input_ids=torch.tensor(prompts)).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, wanted.expand_as(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _anywhere(random_: random.Random) -> Walk:
    walk = Walk(Task.random("warm-up", random_), random_.randrange(10))
    walk.carries = random_.choice(("nothing", "key", "treasure"))
    return walk


def play(model: Any, tasks: Sequence[Task], generator: torch.Generator) -> tuple[list[Group], float]:
    """One batch of `EPISODES_PER_TASK` episodes per task, and the share of them that found the treasure.

    Every achievement (key, treasure) has a reward of 1 on its call, from the source `steps`; the outcome has
    one on the episode, from the source `outcome`. Which of them a rule sees is the caller's choice.
    """
    walks = [Walk(task) for task in tasks for _ in range(EPISODES_PER_TASK)]
    calls: list[list[Call]] = [[] for _ in walks]
    rewards: list[list[Reward]] = [[] for _ in walks]
    while not walks[0].is_over:
        prompts = [walk.prompt() for walk in walks]
        with torch.no_grad():
            logps = model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
        sampled = torch.multinomial(logps.exp(), 1, generator=generator)
        values = logps.gather(1, sampled)[:, 0].tolist()
        for i, (walk, token) in enumerate(zip(walks, sampled[:, 0].tolist(), strict=True)):
            name = f"{walk.task.id}-e{i % EPISODES_PER_TASK}"
            call = _call(name, walk, prompts[i], token, values[i])
            calls[i].append(call)
            if walk.pull(token):
                rewards[i].append(
                    Reward(f"{call.id}-r", name, RewardTarget.CALL, 1.0, "steps", 0, call_id=call.id)
                )
    groups = []
    for start, task in zip(range(0, len(walks), EPISODES_PER_TASK), tasks, strict=True):
        members = range(start, start + EPISODES_PER_TASK)
        episodes = tuple(_episode(walks[i], calls[i], rewards[i]) for i in members)
        groups.append(Group(task.id, task.id, "", EPISODES_PER_TASK, episodes))
    return groups, sum(walk.reward for walk in walks) / len(walks)


def _call(episode: str, walk: Walk, prompt: Sequence[int], token: int, logprob: float) -> Call:
    name = f"{episode}-c{walk.room}"
    choice = Choice(name, 0, token_ids([token]), logprobs([min(logprob, 0.0)]), "stop", None, None)
    return Call(
        id=name,
        episode_id=episode,
        ordinal=walk.room,
        agent=None,
        kind=CallKind.POLICY,
        parent_call_id=None,
        state_key=walk.state_key(),
        policy="policy",
        policy_version=0,
        policy_version_end=0,
        status=CallStatus.COMPLETE,
        delivered=True,
        fingerprint_id=None,
        sampling={},
        prompt_ids=token_ids(prompt),
        choices=(choice,),
    )


def _episode(walk: Walk, calls: Sequence[Call], steps: Sequence[Reward]) -> Episode:
    name = calls[0].episode_id
    outcome = Reward(f"{name}-r", name, RewardTarget.EPISODE, walk.reward, "outcome", 0)
    return Episode(
        id=name,
        task_id=walk.task.id,
        group_id=walk.task.id,
        purpose=Purpose.TRAIN,
        status=EpisodeStatus.ENDED,
        created_at_ms=0,
        ended_at_ms=1,
        tags={},
        calls=tuple(calls),
        rewards=(*steps, outcome),
    )
