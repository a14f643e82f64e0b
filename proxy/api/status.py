"""How the proxy is doing: for people, and for whatever restarts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ...store.read import count_episodes
from .context import Context

router = APIRouter(tags=["status"])


@router.get("/healthz")
async def healthz(context: Context) -> JSONResponse:
    """200 while calls can be served, 503 with the reason otherwise."""
    fault = context.recorder.refusal
    if fault is None and context.live.base_model is None:
        fault = "the engine has not been reached yet"
    doc = {"status": "ok"} if fault is None else {"status": "unavailable", "reason": fault}
    return JSONResponse(doc, status_code=200 if fault is None else 503)


@router.get("/lightning/api/status")
async def status(context: Context) -> dict[str, Any]:
    counts = await context.read(count_episodes)
    return {
        "episodes": asdict(counts),
        "engine": {"url": context.settings.engine_url, "base_model": context.live.base_model},
        "calls_in_flight": context.live.gate.in_flight,
        "recording": {
            "mode": context.settings.recording,
            "durability": context.settings.durability,
            "fault": context.recorder.fault,
            "entries_queued": context.recorder.num_queued,
            "entries_lost": context.recorder.num_lost,
        },
    }
