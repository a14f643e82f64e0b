"""What an engine that somebody else started can do, what is lost where it can't, and which flag gives it.

Everything is seen by behaviour, with requests that change nothing: a handful of tokens is generated, no
adapter and no weight is touched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .client import EngineClient, EngineModel
from .fingerprint import PROCESSED, likeliest, logprobs_mode
from .launch import RELOAD_EXTENSION

_MESSAGES = [{"role": "user", "content": "Count: 1, 2, 3"}]
_NUM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability. `is_needed`: recording is not exact without it. `remedy` is empty where all is fine."""

    name: str
    is_fine: bool
    is_needed: bool
    found: str
    lost: str = ""
    remedy: str = ""


async def examine(client: EngineClient) -> list[Finding]:
    """Look at every capability. Raises EngineError when the engine is not reachable or serves no model."""
    base = await client.base_model()
    mode = await logprobs_mode(client, base.name)
    return [
        Finding("reachable", True, True, f"{base.name} = {base.root}"),
        Finding("version", True, False, f"vLLM {await client.version()}"),
        _ids("ids in answers", await _answer(client, base.name)),
        _ids("ids in streams", await _streamed(client, base.name)),
        _mode(mode),
        await _defaults(client, base.name, mode),
        await _prompt_logprobs(client, base),
        await _adapters(client),
        await _reload(client),
        await _scale_out(client, base.name),
    ]


def _request(model: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": _MESSAGES, "max_tokens": _NUM_TOKENS}
    return body | {"logprobs": True, "return_token_ids": True} | more


async def _answer(client: EngineClient, model: str) -> str:
    """What is wrong with ids and logprobs of a plain answer; empty if nothing."""
    answer = await client.ask("POST", "/v1/chat/completions", _request(model))
    if answer.status != 200:
        return f"the engine answered {answer.status}"
    try:
        choice = answer.doc["choices"][0]
        ids, prompt = choice.get("token_ids"), answer.doc.get("prompt_token_ids")
        num_logprobs = len((choice.get("logprobs") or {}).get("content") or ())
        return _misfit(prompt, ids, num_logprobs, answer.doc["usage"]["completion_tokens"])
    except (TypeError, KeyError, IndexError):
        return "not an OpenAI-compatible answer"


async def _streamed(client: EngineClient, model: str) -> str:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.ask("POST", "/v1/chat/completions", _request(model, **more))
    if answer.status != 200:
        return f"the engine answered {answer.status}"
    prompt: list[int] | None = None
    ids: list[int] = []
    num_logprobs, count = 0, 0
    for line in str(answer.doc).splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        prompt = prompt or chunk.get("prompt_token_ids")
        count = (chunk.get("usage") or {}).get("completion_tokens", count)
        for choice in chunk.get("choices", ()):
            ids += choice.get("token_ids") or ()
            num_logprobs += len((choice.get("logprobs") or {}).get("content") or ())
    return _misfit(prompt, ids, num_logprobs, count)


def _misfit(prompt: list[int] | None, ids: list[int] | None, num_logprobs: int, count: int) -> str:
    if not prompt:
        return "no prompt ids"
    if not ids:
        return "no completion ids"
    if not len(ids) == num_logprobs == count:
        return f"{len(ids)} ids, {num_logprobs} logprobs, {count} tokens counted"
    return ""


def _ids(name: str, misfit: str) -> Finding:
    if not misfit:
        return Finding(name, True, True, "ids, logprobs and the engine's count agree")
    return Finding(
        name, False, True, misfit, "calls are quarantined: nothing can be trained", "use vLLM 0.32 or newer"
    )


def _mode(mode: str | None) -> Finding:
    if mode == PROCESSED:
        return Finding("logprobs mode", True, True, mode)
    lost = "at a temperature other than 1, recorded logprobs are not those that were sampled from"
    return Finding(
        "logprobs mode", False, True, mode or "unknown", lost, "--logprobs-mode processed_logprobs"
    )


async def _defaults(client: EngineClient, model: str, mode: str | None) -> Finding:
    """A model's generation_config.json narrows sampling where a request says nothing, unseen by the log."""
    name, remedy = "sampling defaults", "--generation-config vllm"
    silent = await likeliest(client, model, {})
    plain = await likeliest(client, model, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
    if mode != PROCESSED or silent is None or plain is None:
        return Finding(name, False, True, "can't be seen with raw logprobs", "perhaps nothing", remedy)
    if abs(silent - plain) > 0.02:
        lost = "calls without a temperature are sampled otherwise than the log says"
        return Finding(name, False, True, "taken from the model's generation_config.json", lost, remedy)
    return Finding(name, True, True, "temperature 1, full support")


async def _prompt_logprobs(client: EngineClient, base: EngineModel) -> Finding:
    body = {"model": base.name, "prompt": "1, 2, 3", "max_tokens": 1, "prompt_logprobs": 0}
    answer = await client.ask("POST", "/v1/completions", body)
    if answer.status == 200 and answer.doc["choices"][0].get("prompt_logprobs"):
        return Finding("re-scoring", True, False, "prompt logprobs")
    return Finding(
        "re-scoring",
        False,
        False,
        f"refused with {answer.status}",
        "new versions can't be probed",
        "use vLLM",
    )


async def _adapters(client: EngineClient) -> Finding:
    if not await client.has_route("/v1/load_lora_adapter"):
        remedy = "--enable-lora --max-loras 3 --max-lora-rank 32 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        return Finding("LoRA versions", False, False, "no route", "adapters can't be published", remedy)
    metrics = await client.ask("GET", "/metrics")
    if metrics.status == 200 and "vllm:lora_requests_info" not in str(metrics.doc):
        remedy = "--enable-lora --max-loras 3 --max-lora-rank 32"
        return Finding("LoRA versions", False, False, "route, but no LoRA", "every load would fail", remedy)
    return Finding("LoRA versions", True, False, "can be loaded")


async def _reload(client: EngineClient) -> Finding:
    name, lost = "full-weight reload", "full weights can't be published"
    wanted = ("/collective_rpc", "/reset_prefix_cache")
    missing = [path for path in wanted if not await client.has_route(path)]
    if missing:
        remedy = "VLLM_SERVER_DEV_MODE=1, on loopback only: no key guards these routes"
        return Finding(name, False, False, f"no {missing[0]}", lost, remedy)
    if not await client.can_reload_all() and await client.is_on_cpu():
        remedy = f"--worker-extension-cls {RELOAD_EXTENSION}"
        return Finding(name, False, False, "keeps tied output weights", lost, remedy)
    return Finding(name, True, False, "development routes are on")


async def _scale_out(client: EngineClient, model: str) -> Finding:
    """Rendering gives the prompt's ids and generates nothing."""
    body = {"model": model, "messages": _MESSAGES}
    answer = await client.ask("POST", "/v1/chat/completions/render", body)
    if answer.status == 200:
        return Finding("rendering", True, False, "scale-out routes are on")
    lost = "prompts of other dialects can't be compared with the engine's own"
    return Finding("rendering", False, False, f"refused with {answer.status}", lost, "--enable-scale-out")


def as_document(url: str, findings: Sequence[Finding]) -> str:
    is_exact = all(finding.is_fine for finding in findings if finding.is_needed)
    return json.dumps({"url": url, "exact": is_exact, "findings": [asdict(finding) for finding in findings]})


def render(url: str, findings: Sequence[Finding]) -> None:
    """Print a table on stdout, and one closing line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"engine at {url}", title_justify="left", show_edge=False)
    for heading in ("", "capability", "found", "without it", "give vLLM"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark = "[green]yes[/]" if finding.is_fine else "[red]NO[/]" if finding.is_needed else "[yellow]no[/]"
        table.add_row(mark, finding.name, finding.found, finding.lost, finding.remedy)
    # In a pipe as wide as the longest line, so that flags can be copied.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
    if any(not finding.is_fine for finding in findings):
        console.print("NO: recording is not exact without it; no: worth having", highlight=False)
    lacking = [finding.name for finding in findings if finding.is_needed and not finding.is_fine]
    console.print(
        f"recording is NOT exact: {', '.join(lacking)}" if lacking else "recording is exact", highlight=False
    )
