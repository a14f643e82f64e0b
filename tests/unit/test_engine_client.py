"""The client's requests and errors, and what `engine check` sees, against a small vLLM of our own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from aiohttp import web

from lightning_rl.engine.check import Finding, as_document, examine, render
from lightning_rl.engine.client import EngineClient, EngineGoneError, EngineRefusedError
from lightning_rl.engine.fingerprint import read_fingerprint
from lightning_rl.engine.probes import PROBE_MESSAGES, PROBE_TEXT, tokenizer_probe
from lightning_rl.errors import EngineError
from lightning_rl.records import token_ids

Body = dict[str, Any]
T = TypeVar("T")


class TinyVllm:
    """What the client asks of vLLM. `lacks` names what this one can't do."""

    def __init__(self, *lacks: str) -> None:
        self.lacks = set(lacks)
        self.asked: list[tuple[str, Body]] = []
        self.adapters: dict[str, str] = {}
        self.label = "default"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.answer({"version": "0.32.0"}))
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/tokenize", self.post(self.tokenize))
        app.router.add_post("/v1/completions", self.post(self.completions))
        app.router.add_post("/v1/chat/completions", self.post(self.chat))
        if "render" not in self.lacks:
            app.router.add_post("/v1/chat/completions/render", self.post(self.render))
        if "adapters" not in self.lacks:
            app.router.add_post("/v1/load_lora_adapter", self.post(self.load))
            app.router.add_post("/v1/unload_lora_adapter", self.post(self.unload))
        if "reload" not in self.lacks:
            app.router.add_post("/collective_rpc", self.post(self.rpc))
            app.router.add_post("/reset_prefix_cache", self.post(self.reset))
            app.router.add_post("/update_weight_version", self.post(self.set_label))
        return app

    def answer(self, doc: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_request: web.Request) -> web.Response:
            return web.json_response(doc)

        return handler

    def post(
        self, handle: Callable[[Body], web.Response]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            raw = await request.read()
            body = json.loads(raw) if raw else {}
            self.asked.append((request.path, body))
            return handle(body)

        return handler

    async def models(self, request: web.Request) -> web.Response:
        if "key" in self.lacks and request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": "Unauthorized"}, status=401)
        base = {"id": "base", "root": "/models/m", "parent": None, "max_model_len": 2048}
        more = [{"id": n, "root": p, "parent": "base"} for n, p in self.adapters.items()]
        return web.json_response({"data": [*more, base]})

    async def weight_info(self, _request: web.Request) -> web.Response:
        if "reload" in self.lacks:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({} if "label" in self.lacks else {"weight_version": self.label})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text="" if "lora" in self.lacks else 'vllm:lora_requests_info{max_lora="3"} 1.0')

    def tokenize(self, body: Body) -> web.Response:
        if "messages" in body:
            if "template" in self.lacks:
                return web.json_response({"error": {"message": "no chat template"}}, status=400)
            assert body["add_generation_prompt"]
            return web.json_response({"tokens": [1, 2, len(body["messages"])]})
        assert body["add_special_tokens"] is False
        return web.json_response({"tokens": [ord(c) for c in body["prompt"]]})

    def completions(self, body: Body) -> web.Response:
        choice: Body = {"text": "x", "logprobs": None, "prompt_logprobs": None}
        ids = body["prompt"]
        if body.get("prompt_logprobs") is not None and "scoring" not in self.lacks:
            known = ids if isinstance(ids, list) else [1, 2]
            rows = [{str(t): {"logprob": -t / 10}, "9": {"logprob": -9.0}} for t in known[1:]]
            choice["prompt_logprobs"] = [None, *rows]
        if body.get("logprobs") is not None and "logprobs" not in self.lacks:
            default = 0.7 if "defaults" in self.lacks else 1.0
            processed = -0.2 * body.get("temperature", default)
            value = -0.2 if "processed" in self.lacks else processed
            choice["logprobs"] = {"top_logprobs": [{"token_id:7": value, "token_id:8": -5.0}]}
        return web.json_response({"choices": [choice]})

    def chat(self, body: Body) -> web.Response:
        given = "ids" not in self.lacks
        logprobs = {"content": [{"token": "a", "logprob": -0.5}] * 4}
        usage = {"completion_tokens": 4}
        if not body.get("stream"):
            choice = {"token_ids": [1, 2, 3, 4] if given else None, "logprobs": logprobs}
            prompt = [5, 6] if given else None
            return web.json_response({"choices": [choice], "prompt_token_ids": prompt, "usage": usage})
        one = {"content": [{"token": "a", "logprob": -0.5}]}
        count = 3 if "a streamed token" in self.lacks else 4
        chunks: list[Body] = [{"choices": [{"delta": {}}], "prompt_token_ids": [5, 6] if given else None}]
        chunks += [
            {"choices": [{"token_ids": [i] if given else None, "logprobs": one}]} for i in range(count)
        ]
        chunks += [{"choices": [], "usage": usage}]
        return web.Response(text="".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def render(self, _body: Body) -> web.Response:
        if "scale out" in self.lacks:
            return web.json_response({"error": {"message": "start with --enable-scale-out"}}, status=403)
        return web.json_response({"token_ids": [5, 6]})

    def load(self, body: Body) -> web.Response:
        if body["lora_path"] == "/none":
            error = {"message": "Loading lora x failed:\nNo adapter found for /none"}
            return web.json_response({"error": error}, status=404)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success: added")

    def unload(self, body: Body) -> web.Response:
        found = self.adapters.pop(body["lora_name"], None)
        return web.Response(text="Success") if found else web.json_response({"error": "none"}, status=404)

    def rpc(self, body: Body) -> web.Response:
        is_ours = body["method"].startswith("lightning_")
        if is_ours and "extension" in self.lacks:
            error = {"message": f"'CPUWorker' object has no attribute '{body['method']}'"}
            return web.json_response({"error": error}, status=500)
        return web.json_response({"results": [is_ours]})

    async def server_info(self, _request: web.Request) -> web.Response:
        device = "cuda" if "cpu" in self.lacks else "cpu"
        return web.json_response({"vllm_config": {"device_config": {"device": device}}})

    def reset(self, _body: Body) -> web.Response:
        return web.json_response({"success": "reset" not in self.lacks})

    def set_label(self, body: Body) -> web.Response:
        self.label = body["new_version"]
        return web.json_response({"success": True})


def with_client(
    vllm: TinyVllm, ask: Callable[[EngineClient], Awaitable[T]], *, api_key: str | None = None
) -> T:
    async def run() -> T:
        runner = web.AppRunner(vllm.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with EngineClient(f"http://127.0.0.1:{port}/", api_key=api_key) as client:
                return await ask(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_models_come_base_first() -> None:
    async def ask(client: EngineClient) -> None:
        await client.load_lora("p@1", "/a/1")
        assert [(m.name, m.root, m.parent) for m in await client.models()] == [
            ("base", "/models/m", None),
            ("p@1", "/a/1", "base"),
        ]
        assert (await client.base_model()).max_model_tokens == 2048
        await client.unload_lora("p@1")
        await client.unload_lora("p@1")
        assert len(await client.models()) == 1

    with_client(TinyVllm(), ask)


def test_scores_are_of_the_given_ids_not_of_the_likeliest() -> None:
    vllm = TinyVllm()

    async def ask(client: EngineClient) -> None:
        scored = await client.score("base", token_ids([1, 2, 3]), cache_salt="s")
        assert list(scored) == pytest.approx([-0.2, -0.3])
        top = await client.next_logprobs("base", token_ids([1, 2]))
        assert top == {7: pytest.approx(-0.2), 8: -5.0}

    with_client(vllm, ask)
    (_, score), (_, following) = vllm.asked
    assert score["prompt"] == [1, 2, 3]
    assert score["cache_salt"] == "s"
    assert score["prompt_logprobs"] == 0
    assert "cache_salt" not in following
    assert "prompt_logprobs" not in following


def test_weights_are_reloaded_labelled_and_the_cache_reset() -> None:
    vllm = TinyVllm()

    async def ask(client: EngineClient) -> None:
        assert await client.weight_label() == "default"
        await client.reload_weights("/v/1")
        assert await client.reset_prefix_cache()
        await client.set_weight_label("policy/1")
        assert await client.weight_label() == "policy/1"

    with_client(vllm, ask)
    assert vllm.asked[1][1] == {"method": "lightning_reload", "kwargs": {"weights_path": "/v/1"}}


def test_an_engine_that_knows_the_route_and_not_the_label_is_none_of_ours() -> None:
    with pytest.raises(EngineError, match="names no weight_version"):
        with_client(TinyVllm("label"), lambda client: client.weight_label())


def test_a_cpu_engine_without_our_reload_would_keep_old_output_weights() -> None:
    vllm = TinyVllm("extension")
    with pytest.raises(EngineError, match="--worker-extension-cls lightning_rl"):
        with_client(vllm, lambda client: client.reload_weights("/v/1"))
    assert [body["method"] for _, body in vllm.asked] == ["lightning_can_reload"]


def test_a_gpu_engine_without_our_reload_has_a_good_one() -> None:
    vllm = TinyVllm("extension", "cpu")
    with_client(vllm, lambda client: client.reload_weights("/v/1"))
    assert vllm.asked[-1][1] == {"method": "reload_weights", "kwargs": {"weights_path": "/v/1"}}


def test_a_cache_that_is_held_is_not_reset() -> None:
    assert with_client(TinyVllm("reset"), lambda client: client.reset_prefix_cache()) is False


def test_missing_routes_and_refusals_are_told_apart() -> None:
    async def ask(client: EngineClient) -> None:
        assert await client.weight_label() is None
        with pytest.raises(EngineRefusedError, match="answered 404") as refused:
            await client.reload_weights("/v/1")
        assert refused.value.status == 404
        with pytest.raises(EngineRefusedError, match=r"failed: No adapter found for /none$"):
            await client.load_lora("x", "/none")
        with pytest.raises(EngineError, match="no prompt logprobs"):
            await client.score("base", token_ids([1, 2]))
        with pytest.raises(EngineError, match="gives no logprobs"):
            await client.next_logprobs("base", token_ids([1, 2]))

    with_client(TinyVllm("reload", "scoring", "logprobs"), ask)


def test_an_engine_that_cannot_sleep_says_how_it_could() -> None:
    async def ask(client: EngineClient) -> None:
        assert not await client.is_asleep()
        await client.wake()
        with pytest.raises(EngineError, match="lightning engine serve --sleep"):
            await client.sleep(1)

    with_client(TinyVllm(), ask)


def test_the_key_is_sent() -> None:
    async def ask(client: EngineClient) -> str:
        return (await client.base_model()).name

    assert with_client(TinyVllm("key"), ask, api_key="secret") == "base"
    with pytest.raises(EngineRefusedError, match="answered 401"):
        with_client(TinyVllm("key"), ask)


def test_an_engine_that_is_not_there_is_gone() -> None:
    async def ask() -> None:
        async with EngineClient("http://127.0.0.1:1") as client:
            with pytest.raises(
                EngineGoneError, match=r"http://127\.0\.0\.1:1 is not reachable: Connection refused$"
            ):
                await client.models()

    asyncio.run(ask())


def test_the_fingerprint_is_equal_for_equal_engines_only() -> None:
    one = with_client(TinyVllm(), read_fingerprint)
    assert one.engine == "vllm 0.32.0"
    assert one.base_model == "/models/m"
    assert one.max_model_tokens == 2048
    assert one.logprobs_mode == "processed_logprobs"
    assert one.tokenizer_probe == tokenizer_probe(ord(c) for c in PROBE_TEXT)
    assert one.template_probe == tokenizer_probe([1, 2, len(PROBE_MESSAGES)])
    assert with_client(TinyVllm(), read_fingerprint) == one
    other = with_client(TinyVllm("template", "processed"), read_fingerprint)
    assert other.id != one.id
    assert other.template_probe is None
    assert other.logprobs_mode == "raw_logprobs"


def found(*lacks: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in with_client(TinyVllm(*lacks), examine)}


def test_check_is_content_with_an_engine_of_ours() -> None:
    findings = found()
    assert all(finding.is_fine for finding in findings.values())
    assert json.loads(as_document("u", list(findings.values())))["exact"] is True


@pytest.mark.parametrize(
    ("lack", "capability", "is_needed", "remedy"),
    [
        ("ids", "ids in answers", True, "vLLM 0.32"),
        ("a streamed token", "ids in streams", True, "vLLM 0.32"),
        ("processed", "logprobs mode", True, "--logprobs-mode processed_logprobs"),
        ("defaults", "sampling defaults", True, "--generation-config vllm"),
        ("scoring", "re-scoring", False, "vLLM"),
        ("adapters", "LoRA versions", False, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("lora", "LoRA versions", False, "--enable-lora"),
        ("reload", "full-weight reload", False, "VLLM_SERVER_DEV_MODE=1"),
        ("extension", "full-weight reload", False, "--worker-extension-cls lightning_rl"),
        ("scale out", "rendering", False, "--enable-scale-out"),
        ("render", "rendering", False, "--enable-scale-out"),
    ],
)
def test_check_names_what_is_lacking_and_the_flag(
    lack: str, capability: str, is_needed: bool, remedy: str
) -> None:
    findings = found(lack)
    lacking = findings[capability]
    assert not lacking.is_fine
    assert lacking.is_needed == is_needed
    assert lacking.lost
    assert remedy in lacking.remedy
    report = json.loads(as_document("u", list(findings.values())))
    assert report["exact"] == (not is_needed)


def test_logprobs_of_zero_are_finite() -> None:
    scored = with_client(TinyVllm(), lambda client: client.score("base", token_ids([0, 0])))
    assert all(math.isfinite(value) for value in scored)


def test_in_a_pipe_no_flag_is_cut_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    render("http://engine", list(found("adapters", "processed").values()))
    shown = capsys.readouterr().out
    assert "--logprobs-mode processed_logprobs" in shown
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in shown
    assert "NO: recording is not exact without it" in shown
