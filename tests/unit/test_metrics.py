"""What operators see: numbers for Prometheus, the status page, the health check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.log_rows import choice, end, intent
from fakes.running_proxy import Running, ask, running_proxy
from prometheus_client.parser import text_string_to_metric_families

from lightning_rl.proxy.metrics import CallMetrics
from lightning_rl.records import Quarantine
from lightning_rl.store.append import Noted

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "base", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


def numbers(running: Running, headers: dict[str, str] | None = None) -> dict[str, float]:
    """`name{label=value,…}` -> value, after every call before it is in the log."""
    ask(running.url, "/lightning/api/status", headers=headers)
    answer = ask(running.url, "/lightning/metrics", headers=headers)
    assert answer.status == 200
    assert dict(answer.headers)["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def status(running: Running) -> Any:
    return json.loads(ask(running.url, "/lightning/api/status").body)


def test_calls_are_counted_when_they_are_in_the_log(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        for more in ({}, {"n": 2}, {"stream": True, "temperature": 0}, {"model": "nope"}):
            ask(running.url, f"/episodes/e{CHAT}", chat(**more))
        found = numbers(running)
    labels = f"dialect=chat,route={CHAT}"
    assert found[f"lightning_calls_total{{{labels},status=complete}}"] == 3
    assert found[f"lightning_calls_total{{{labels},status=error}}"] == 1
    assert found["lightning_tokens_total{kind=completion}"] == 4 * 6
    assert found["lightning_tokens_total{kind=prompt}"] == 3 * 5
    assert found["lightning_quarantined_choices_total{reason=temperature_zero}"] == 1
    assert found["lightning_call_seconds_count{dialect=chat}"] == 4
    assert found["lightning_first_byte_seconds_bucket{dialect=chat,le=+Inf}"] == 4
    assert found["lightning_recorder_writable"] == found["lightning_engine_seen"] == 1
    assert found["lightning_lost_entries_total"] == found["lightning_calls_waiting"] == 0
    assert found["lightning_policy_live_version{policy=policy}"] == 0


def test_the_documentation_names_every_number_and_no_other(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        shown = ask(running.url, "/lightning/metrics").body.decode()
    table = (Path(__file__).parents[2] / "docs" / "api.md").read_text().partition("| metric |")[2]
    documented = set(re.findall(r"`(lightning_\w+)`", table))
    assert documented == set(re.findall(r"^# TYPE (\w+) ", shown, re.MULTILINE))


def test_the_engines_own_metrics_pass_and_ours_need_the_token(tmp_path: Path) -> None:
    with running_proxy(tmp_path, token="secret-token") as running:
        headers = {"Authorization": "Bearer secret-token"}
        assert ask(running.url, "/lightning/metrics").status == 401
        assert "lightning_calls_in_flight" in numbers(running, headers)
        direct = ask(running.engine_url, "/metrics")
        assert ask(running.url, "/metrics", headers=headers).body == direct.body


def test_what_was_odd_about_calls_is_visible(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        ask(running.url, CHAT, chat())
        ask(running.url, CHAT, chat(metadata={"episode_id": 7}))
        ask(running.url, f"/episodes/e{CHAT}", chat(metadata={"episode_id": "other"}))
        ask(running.url, "/lightning/api/episodes/e/end", b"{}")
        ask(running.url, f"/episodes/e{CHAT}", chat(metadata={"episode_id": "x" * 300}))
        ask(running.url, f"/episodes/r{CHAT}", chat(), {"Idempotency-Key": "k"})
        ask(running.url, f"/episodes/r{CHAT}", chat(), {"Idempotency-Key": "k"})
        found, shown = numbers(running), status(running)["attribution"]
        conflicts = [row["attribution_conflict"] for row in running.rows("calls")]
    assert "not a name: metadata.episode_id is not text" in conflicts
    assert shown == {
        "unattributed": 2,
        "conflicts": 3,
        "malformed_marks": 2,
        "late_calls": 1,
        "retry_orphans": 1,
        "since_start": {
            "unattributed": 2,
            "conflicts": 1,
            "malformed_marks": 2,
            "late_calls": 1,
            "retries": 1,
        },
    }
    assert found["lightning_unattributed_calls_total"] == found["lightning_malformed_marks_total"] == 2
    assert found["lightning_late_calls_total"] == found["lightning_retries_total"] == 1


def test_a_histogram_is_cumulative_and_a_conflict_may_be_of_both_kinds() -> None:
    metrics = CallMetrics()
    for number, seconds in enumerate((0.005, 0.0051, 700)):
        name = str(number)
        metrics.observe([intent(name, started_at_ms=0)], None)
        metrics.observe([end(name, ended_at_ms=int(1000 * seconds), first_byte_at_ms=None)], Noted(1, 2))
    (histogram,) = [family for family in metrics.histograms() if family.name == "lightning_call_seconds"]
    counts = {sample.labels.get("le"): sample.value for sample in histogram.samples}
    assert (counts["0.005"], counts["600.0"], counts["+Inf"]) == (2, 2, 3)
    assert (metrics.num_late, metrics.num_retries) == (3, 6)
    metrics.observe([intent("both", conflict="not a name: x is empty; body says 'b'")], None)
    metrics.observe([end("no-intent", None, choice(quarantine=Quarantine.IMAGES))], None)
    assert (metrics.num_malformed, metrics.num_conflicts) == (1, 1)


@pytest.mark.parametrize(
    ("mode", "code", "said"), [("required", 503, "unavailable"), ("best-effort", 200, "degraded")]
)
def test_health_says_recording_and_engine_apart(tmp_path: Path, mode: str, code: int, said: str) -> None:
    with running_proxy(tmp_path, recording=mode) as running:
        running.proxy.recorder._fault = "disk full"
        answer = ask(running.url, "/healthz")
        assert answer.status == code
        assert (doc := json.loads(answer.body))["status"] == said
        assert (doc["recording"], doc["engine"]) == ("disk full", "ok")
        running.proxy.recorder._fault = None
        running.proxy.live.forget_engine()
        answer = ask(running.url, "/healthz")
        assert answer.status == 503
        assert json.loads(answer.body)["recording"] == "ok"
        assert "engine" in json.loads(answer.body)["reason"]
