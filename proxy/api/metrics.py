"""The numbers for Prometheus: what was recorded, and how things stand at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ..metrics import CONTENT_TYPE, render
from .context import ApiContext, Context

if TYPE_CHECKING:
    from prometheus_client.core import Metric

router = APIRouter(tags=["status"])


@router.get("/lightning/metrics")
async def show(context: Context) -> Response:
    def collect() -> Iterator[Metric]:
        yield from context.metrics.counters()
        yield from context.metrics.histograms()
        yield from _now(context)

    return Response(await run_in_threadpool(render, collect), media_type=CONTENT_TYPE)


def _now(context: ApiContext) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    recorder, gate = context.recorder, context.live.gate
    yield CounterMetricFamily(
        "lightning_lost_entries", "Log entries that could not be written.", value=recorder.num_lost
    )
    redacted = CounterMetricFamily(
        "lightning_redacted_calls", "Calls in which a rule found something.", labels=("rule",)
    )
    for rule, count in dict(context.redactor.num_by_rule).items():
        redacted.add_metric((rule,), count)
    yield redacted
    for name, about, value in (
        ("lightning_recorder_queue", "Log entries that wait to be written.", recorder.num_queued),
        ("lightning_recorder_writable", "1 while the log can be written.", recorder.fault is None),
        ("lightning_engine_seen", "1 while an engine is there.", context.live.base_model is not None),
        ("lightning_calls_in_flight", "Calls that the engine works on.", gate.in_flight),
        ("lightning_calls_waiting", "Calls that wait for new weights.", gate.waiting),
    ):
        yield GaugeMetricFamily(name, about, value=float(value))
    versions = GaugeMetricFamily(
        "lightning_policy_live_version", "The version that serves the policy.", labels=("policy",)
    )
    for policy in context.live.visible_models():
        version = context.live.live_version(policy)
        if version is not None:
            versions.add_metric((policy,), version)
    yield versions
