"""Policies: which versions there are, what became of each, and which one serves."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter

from ...records import PolicyVersion
from ...store.policies import policy_names, versions
from .context import Context

router = APIRouter(prefix="/lightning/api/policies", tags=["policies"])


@router.get("")
async def show(context: Context) -> dict[str, Any]:
    def load(conn: sa.Connection) -> dict[str, list[PolicyVersion]]:
        names = {context.settings.policy, *policy_names(conn)}
        return {name: versions(conn, name) for name in sorted(names)}

    found = await context.read(load)
    return {
        "policies": [
            {
                "policy": name,
                "live_version": context.live.live_version(name),
                "versions": [_version_doc(version) for version in its_versions],
            }
            for name, its_versions in found.items()
        ]
    }


def _version_doc(version: PolicyVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "status": version.status,
        "kind": version.kind,
        "path": version.path,
        "run": version.run_id,
        "step": version.step,
        "created_at_ms": version.created_at_ms,
        "verdict": version.verdict,
    }
