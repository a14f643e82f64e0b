"""The main job on the real engine: record, reward, train, publish; the agent knows a base URL, no more."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "calculator"))  # the example is a program, not a package

RESCORED_WITHIN = 0.01  # nats; float32 on both sides, other batch shapes
SWAP_CALLS = 32


@dataclass(frozen=True)
class Proxy:
    url: str
    db: str


def lightning(*arguments: str, timeout_sec: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_rl.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_sec,
        check=False,
    )


@pytest.fixture
def proxy(engine_url: str, model_folder: Path, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy process with a new log; afterwards the engine has its base weights again."""
    db = f"sqlite:///{tmp_path / 'log.db'}"
    command = [
        sys.executable,
        "-m",
        "lightning_rl.cli",
        "proxy",
        "serve",
        "--db",
        db,
        "--engine-url",
        engine_url,
    ]
    with (tmp_path / "proxy.log").open("w") as log:
        process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        ready = re.search(r"OPENAI_BASE_URL=(\S+)/v1", said)
        assert ready, said + (tmp_path / "proxy.log").read_text()
        yield Proxy(ready[1], db)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
        asyncio.run(_restore(engine_url, model_folder))
    assert process.returncode == 0, (tmp_path / "proxy.log").read_text()


async def _restore(engine_url: str, model_folder: Path) -> None:
    from lightning_rl.engine.client import EngineClient

    async with EngineClient(engine_url) as engine:
        await engine.reload_weights(str(model_folder))
        assert await engine.reset_prefix_cache()


def recorded_calls(proxy: Proxy, upstream_ids: list[str]):
    from lightning_rl.store.database import Database
    from lightning_rl.store.read import calls_by_upstream_ids

    database = Database.open(proxy.db, migrate=False)
    try:
        with database.read() as conn:
            return calls_by_upstream_ids(conn, upstream_ids)
    finally:
        database.close()


def worst_gap(recorded, rescored) -> float:
    return max(abs(a - b) for a, b in zip(recorded, rescored, strict=True))


def test_a_streaming_agent_is_recorded_exactly(proxy, engine_url, model_folder):
    from outcome import count_exact, worst_rescored_gap
    from produce import produce
    from tasks import make_tasks

    tasks = make_tasks()[0][:50]
    produced = asyncio.run(produce(proxy.url, tasks, batch="stream", concurrency=32, stream=True))
    assert produced.errors == []
    assert produced.num_calls == len(produced.replies) == 100
    assert count_exact(proxy.db, model_folder, produced.replies) == produced.num_calls

    assert worst_rescored_gap(proxy.db, engine_url, produced.replies) <= RESCORED_WITHIN


@pytest.mark.parametrize(("weights", "learning_rate"), [("full", "2e-5"), ("lora", "1e-3")])
def test_one_step_from_episodes_to_a_live_version(proxy, model_folder, tmp_path, weights, learning_rate):
    from produce import produce
    from tasks import make_tasks

    tasks = make_tasks()[0][:6]
    produced = asyncio.run(produce(proxy.url, tasks, batch="first", episodes_per_task=6))
    assert produced.errors == []
    assert 0 < produced.success < 1
    arguments = ["--db", proxy.db, "--model", str(model_folder), "--output", str(tmp_path / "runs")]
    arguments += ["--weights", weights, "--learning-rate", learning_rate, "--json"]
    trained = lightning("train", *arguments)
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in trained.stdout.splitlines()]
    step = next(line for line in lines if "gap_mean" in line)
    assert step["to_version"] == 1
    assert step["choices_trained"] > 0
    assert step["gap_mean"] <= 0.02
    asked = asyncio.run(produce(proxy.url, tasks[:1], batch="second"))
    calls = recorded_calls(proxy, [reply.id for reply in asked.replies]).values()
    assert [(call.policy, call.policy_version, call.policy_version_end) for call in calls] == [
        ("policy", 1, 1)
    ] * 2
    again = lightning("train", *arguments)
    assert again.returncode == 2, "one episode without siblings is nothing to train"
    assert again.stderr.startswith("lightning: nothing to train")
    assert len(again.stderr.strip().splitlines()) == 1


def _perturbed(model_folder: Path, folder: Path):
    """A model folder whose weights are a little off, with a probe that says so, and a scorer of both."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightning_rl.records import ProbeSequence, WeightsKind, logprobs, token_ids
    from lightning_rl.trainer.version_folders import save_version

    models = [AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32) for _ in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.02)

    def score(version: int, ids) -> list[float]:
        with torch.no_grad():
            logits = models[version](torch.tensor([list(ids)])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0].tolist()

    saved = save_version(models[1], folder, base_model=model_folder, kind=WeightsKind.FULL)
    sequences = [token_ids(range(1000 + 40 * i, 1040 + 40 * i)) for i in range(4)]
    probe = tuple(ProbeSequence(ids, logprobs(score(0, ids)), logprobs(score(1, ids))) for ids in sequences)
    return saved, probe, score


def test_calls_in_flight_while_a_version_goes_live(proxy, model_folder, tmp_path):
    """None fails, and each one's ids, scored outside the engine, belong to the version that it claims."""
    import aiohttp
    from openai import AsyncOpenAI

    from lightning_rl.records import PolicyVersion, VersionStatus, now_ms
    from lightning_rl.store.database import Database
    from lightning_rl.store.policies import add_candidate, load_version

    saved, probe, score = _perturbed(model_folder, tmp_path / "v1")
    candidate = PolicyVersion(
        policy="policy",
        version=1,
        status=VersionStatus.CANDIDATE,
        kind=saved.kind,
        path=str(saved.path),
        checksum=saved.checksum,
        probe=probe,
        base_model=str(model_folder),
        run_id=None,
        step=None,
        created_at_ms=now_ms(),
    )
    database = Database.open(proxy.db, migrate=False)
    went_live = asyncio.Event()

    async def keep_calling(client: AsyncOpenAI, number: int) -> list[str]:
        """Streams one call after another until the version is live, and two more after that."""
        ids, left = [], 2
        while left:
            left -= went_live.is_set()
            stream = await client.chat.completions.create(
                model="gpt-4o",
                messages=[{"role": "user", "content": f"Tell me about the number {number}."}],
                max_tokens=24,
                temperature=1.0,
                stream=True,
            )
            async with stream as chunks:
                last = None
                async for chunk in chunks:
                    last = chunk
            assert last is not None
            assert last.choices[0].finish_reason is not None
            ids.append(last.id)
        return ids

    async def publish() -> None:
        await asyncio.sleep(3)  # by now every caller has a stream open
        with database.write() as conn:
            add_candidate(conn, candidate)
        async with asyncio.timeout(120):
            while True:
                with database.read() as conn:
                    row = load_version(conn, "policy", 1)
                assert row is not None
                assert row.status is not VersionStatus.REJECTED, row.verdict
                if row.status is VersionStatus.LIVE:
                    went_live.set()
                    return
                await asyncio.sleep(0.1)

    async def run() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{proxy.url}/v1", api_key="any", max_retries=0, timeout=300
        ) as client:
            callers = [asyncio.create_task(keep_calling(client, i)) for i in range(SWAP_CALLS)]
            await publish()
            return [identifier for ids in await asyncio.gather(*callers) for identifier in ids]

    async def statuses() -> dict[str, object]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{proxy.url}/lightning/api/policies") as answer,
        ):
            return await answer.json()

    try:
        identifiers = asyncio.run(run())
        policies = asyncio.run(statuses())
    finally:
        database.close()
    assert policies["policies"][0]["live_version"] == 1
    calls = recorded_calls(proxy, identifiers)
    assert len(calls) == len(identifiers) >= 3 * SWAP_CALLS
    by_version = {0: 0, 1: 0}
    for call in calls.values():
        (choice,) = call.choices
        assert choice.quarantine is None
        assert call.policy_version == call.policy_version_end
        ids = call.prompt_ids + choice.completion_ids
        gaps = [
            worst_gap(choice.behavior_logprobs, score(v, ids)[len(call.prompt_ids) - 1 :]) for v in (0, 1)
        ]
        assert gaps[call.policy_version] <= RESCORED_WITHIN
        assert gaps[1 - call.policy_version] > 10 * RESCORED_WITHIN
        by_version[call.policy_version] += 1
    assert min(by_version.values()) >= SWAP_CALLS
