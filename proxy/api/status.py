"""How the proxy is doing: for people, and for whatever restarts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ...store.fleet import FleetView, ProxyRow, view
from ...store.marks import count_marks
from ...store.read import count_episodes
from ..live.engines import EngineState
from ..readiness import engine_fault
from .context import Context

router = APIRouter(tags=["status"])


@router.get("/healthz")
async def healthz(context: Context) -> JSONResponse:
    """200 while calls can be served, else 503 with the reason; `recording` and `engine` say each alone."""
    recording = context.recorder.fault
    engine = engine_fault(context.live, context.engines)
    reason = context.recorder.refusal or engine
    status = "unavailable" if reason is not None else "ok" if recording is None else "degraded"
    doc = {"status": status, "recording": recording or "ok", "engine": engine or "ok"}
    if reason is not None:
        doc["reason"] = reason
    return JSONResponse(doc, status_code=200 if reason is None else 503)


@router.get("/lightning/api/status")
async def status(context: Context) -> dict[str, Any]:
    def load(conn: sa.Connection) -> tuple[dict[str, int], dict[str, int], FleetView]:
        return asdict(count_episodes(conn)), asdict(count_marks(conn)), view(conn)

    episodes, marks, fleet = await context.read(load)
    metrics = context.metrics
    return {
        "episodes": episodes,
        "engine": {"url": context.settings.engine_url[0], "base_model": context.live.base_model},
        "engines": [_engine_doc(engine) for engine in context.engines.all],
        "proxies": [_proxy_doc(row, fleet) for row in fleet.proxies],
        "calls_in_flight": context.live.gate.in_flight,
        "calls_waiting": context.live.gate.waiting,
        "attribution": {
            **marks,
            "since_start": {
                "unattributed": metrics.num_unattributed,
                "conflicts": metrics.num_conflicts,
                "malformed_marks": metrics.num_malformed,
                "late_calls": metrics.num_late,
                "retries": metrics.num_retries,
            },
        },
        "recording": {
            "mode": context.settings.recording,
            "durability": context.settings.durability,
            "fault": context.recorder.fault,
            "entries_queued": context.recorder.num_queued,
            "entries_lost": context.recorder.num_lost,
            "calls_redacted": dict(context.redactor.num_by_rule),
        },
    }


def _proxy_doc(row: ProxyRow, fleet: FleetView) -> dict[str, Any]:
    return {
        "proxy": row.id,
        "host": row.host,
        "pid": row.pid,
        "started_at_ms": row.started_at_ms,
        "seen_ms_ago": fleet.now_ms - row.seen_at_ms,
        "publishes": row.id == fleet.owner,
    }


def _engine_doc(engine: EngineState) -> dict[str, Any]:
    return {
        "url": engine.url,
        "is_up": engine.is_up,
        "in_rotation": engine.is_up and engine.in_rotation,
        "calls_in_flight": engine.in_flight,
        "fingerprint": engine.fingerprint_id,
    }
