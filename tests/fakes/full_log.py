"""A log with rows in every table, for tests of what treats the log as a whole."""

from __future__ import annotations

import base64
import json
import random

from fakes.log_rows import choice, end, intent, reward
from fakes.store_behaviours import write

from lightning_rl.records import (
    CallDelivered,
    CallStatus,
    EpisodeStatus,
    Fingerprint,
    ManifestChoice,
    PolicyVersion,
    ProbeSequence,
    Quarantine,
    RewardTarget,
    StepManifest,
    VersionStatus,
    WeightsKind,
    logprobs,
    token_ids,
)
from lightning_rl.store import append, policies, read, runs
from lightning_rl.store.database import Database

IMAGE = "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(6000)).decode()
SYSTEM = "You are an agent that solves a task step by step, with care. " * 4


def messages(episode: str, turn: int) -> list[dict[str, object]]:
    """What the agent sends: a system prompt that all share, an image, and what was said so far."""
    picture = [
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "text", "text": f"task of {episode}"},
    ]
    said = [
        {"role": role, "content": f"{role} of {episode} in turn {number}: " + "so it goes " * 12}
        for number in range(turn)
        for role in ("assistant", "user")
    ]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": picture}, *said]


def prompt(episode: str, turn: int) -> list[int]:
    """300 tokens that all share, then the episode's own, 200 more per turn."""
    rng = random.Random(episode)
    return [*range(300), *(rng.randrange(150_000) for _ in range(200 * (turn + 1)))]


def play(
    database: Database, name: str, task: str | None, value: float | None, *, turns: int = 3, **more: int
) -> None:
    """An episode of some calls, each complete and delivered; rewarded and ended unless `value` is None."""
    for turn in range(turns):
        call = f"{name}.{turn}"
        body = json.dumps({"model": "gpt-4o", "messages": messages(name, turn)}).encode()
        rng = random.Random(call)
        ids = [rng.randrange(150_000) for _ in range(20)]
        write(
            database,
            intent(call, name, task=task, batch="b" if task else None, agent="planner", body=body, **more),
            end(call, prompt(name, turn), choice(ids, [-rng.random() for _ in ids])),
            CallDelivered(call, True),
        )
    if value is not None:
        with database.write() as conn:
            append.add_reward(conn, reward(name, value, id=f"r-{name}", final=True, note=f"note of {name}"))


def fill(database: Database) -> None:
    """Two groups of two (one trained), an evaluation-free rest of odd rows, a policy with two versions."""
    fingerprint = Fingerprint("fp", "vllm 0.32.0", "base", "t", "c", 2048, "raw_logprobs")
    with database.write() as conn:
        append.add_fingerprint(conn, fingerprint)
    for number in range(2):
        play(database, f"a{number}", "task-a", float(number), version=0)
        play(database, f"b{number}", "task-b", 1.0 - number, version=1)
    write(
        database,
        intent("odd.0", "odd", fingerprint_id="fp", tags={"k": "v"}, conflict="body names 'x'"),
        end("odd.0", [], choice([], [], quarantine=Quarantine.NO_PROMPT_IDS)),
        intent("odd.1", "odd"),
        end("odd.1", [1], choice([2, 3], [-9999.0, float("nan")], quarantine=Quarantine.BAD_LOGPROB)),
        intent("odd.2", "odd"),
        end("odd.2", None, status=CallStatus.ERROR, http_status=500, error="boom", choices=()),
        intent("odd.3", "odd"),  # cut off by a crash
        intent("bin.0", None),
        end("bin.0", prompt("bin", 0), choice([5, 6], [-0.5, -0.25]), choice([7], [-1.0], index=1)),
        end("stub", [4, 5]),  # its intent was lost
    )
    with database.write() as conn:
        append.create_episode(conn, episode_id="a0", task_id="task-a", batch="b", expected_size=2)
        append.end_episode(conn, "odd", status=EpisodeStatus.FAILED, by="runner", note="crashed")
        append.mark_gap(conn, "odd", source="recorder", note="a call was served but not recorded")
        first = reward("a0", 0.25, "judge", id="r-judge")
        for row in (
            first,
            reward("a0", 0.5, "judge", id="r-judge2", supersedes=first.id),
            reward("a0", 0.1, target=RewardTarget.AGENT, agent="planner", id="r-agent"),
            reward(
                "a0",
                0.2,
                target=RewardTarget.TOKENS,
                call_id="a0.1",
                token_start=1,
                token_end=4,
                id="r-tokens",
            ),
        ):
            append.add_reward(conn, row)
        policies.add_candidate(conn, version(0, VersionStatus.LIVE))
        policies.add_candidate(conn, version(1))
        policies.set_version_status(
            conn, "policy", 1, VersionStatus.LIVE, verdict={"moved": 0.5}, source="publisher"
        )
        runs.create_run(conn, "run", "policy", {"seed": 0}, {"torch": "2"})
        runs.add_manifest(conn, manifest("a"))
        runs.finish_step(conn, "run", 0, to_version=1, metrics={"reward": 0.5})


def version(number: int, status: VersionStatus = VersionStatus.CANDIDATE) -> PolicyVersion:
    probe = ProbeSequence(token_ids([1, 2, 3]), logprobs([-0.1, -0.2]), logprobs([-0.3, -1e-7]))
    run = ("run", 0) if number else (None, None)
    return PolicyVersion(
        "policy", number, status, WeightsKind.LORA, f"/v/{number}", "sha256:0", (probe,), "base", *run, 1
    )


def manifest(group: str, run: str = "run", step: int = 0) -> StepManifest:
    group_id = read.group_id(f"task-{group}", "b")
    return StepManifest(
        run_id=run,
        step=step,
        policy="policy",
        from_version=0,
        choices=tuple(
            ManifestChoice(f"{group}{n}.{turn}", 0, f"{group}{n}", group_id, "planner", n - 0.5, 1 / 3, None)
            for n in range(2)
            for turn in range(3)
        ),
        reward_ids={f"{group}{n}": (f"r-{group}{n}",) for n in range(2)},
        returns={f"{group}{n}": float(n) for n in range(2)},
    )
