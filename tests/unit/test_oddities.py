"""Settings that are allowed and hardly meant: a warning at start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.fake_vllm import FakeVllm, serving
from fakes.running_proxy import running_proxy
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.proxy.engine_watch import require_engine
from lightning_rl.proxy.oddities import oddities
from lightning_rl.settings.proxy import ProxySettings

JUDGE = {"model": "openai/gpt-4o", "api_key_env": "JUDGE_KEY"}


def test_what_is_meant_is_not_told() -> None:
    settings = ProxySettings.load(
        providers={"judge": JUDGE},
        aliases={"a*": "policy", "b": "policy@3", "c": "base", "d": "judge", "e": "second"},
    )
    assert oddities(settings, {"base"}, ["second"], {"JUDGE_KEY": "k"}) == []


def test_what_is_hardly_meant_is() -> None:
    settings = ProxySettings.load(
        policy="base",
        providers={"judge": JUDGE},
        aliases={"x*": "nopolicy", "y": "planner"},
        agent_policies={"a": "planner", "b": "judge"},
    )
    policy, agent, alias, provider = oddities(settings, {"base"}, [], {})
    assert policy.startswith("policy 'base' is also a model's name in the engine")
    assert agent.startswith("agent 'b' has policy 'judge', which is also a model's name")
    assert alias.startswith("alias 'x*' leads to 'nopolicy', which is no policy")
    assert provider == "provider 'judge' has no key: the variable JUDGE_KEY is not set"


def test_a_proxy_as_engine_is_told_and_an_engine_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_proxy(tmp_path, FakeVllm()) as running:
        settings = ProxySettings.load(engine_url=[running.url, running.engine_url])
        assert "base" in asyncio.run(require_engine(settings))
    (line,) = [record.message for record in caplog.records if "lightning proxy itself" in record.message]
    assert running.url in line


def test_its_own_address_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(FakeVllm()) as free_url:
        port = free_url.rpartition(":")[2]
    flags = ["--port", port, "--engine-url", f"http://localhost:{port}"]
    result = CliRunner().invoke(app, ["proxy", "serve", *flags])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "is the address of this proxy" in result.stderr
