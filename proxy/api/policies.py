"""Policies: which versions there are, what became of each, which one serves, and which one is to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ...records import PolicyVersion
from ...store.policies import policy_names, versions
from ...store.policy_requests import Verb, requests_of
from ...store.promotion import ask_for_version
from .context import Context

VersionNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]

router = APIRouter(prefix="/lightning/api/policies", tags=["policies"])


class Rollback(BaseModel):
    """The version to go back to; left out: the one that was live before. 0 is the base model."""

    model_config = ConfigDict(extra="forbid")

    version: VersionNumber | None = None
    note: str | None = None
    even_if_rejected: bool = False


class Promotion(Rollback):
    """The version that is to serve."""

    version: VersionNumber


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
                "canary_version": context.live.canary_version(name),
                "versions": [_version_doc(version) for version in its_versions],
            }
            for name, its_versions in found.items()
        ]
    }


@router.get("/{policy}/requests")
async def show_requests(policy: str, context: Context) -> dict[str, Any]:
    """What was asked of the publisher, by age, and what became of it."""
    found = await context.read(lambda conn: requests_of(conn, policy))
    return {"requests": [asdict(request) for request in found]}


@router.post("/{policy}/promote", status_code=202)
async def promote(policy: str, body: Promotion, context: Context) -> dict[str, Any]:
    return await _ask(policy, "promote", body, context)


@router.post("/{policy}/rollback", status_code=202)
async def rollback(policy: str, body: Rollback, context: Context) -> dict[str, Any]:
    return await _ask(policy, "rollback", body, context)


async def _ask(policy: str, verb: Verb, body: Rollback, context: Context) -> dict[str, Any]:
    """The request; `outcome` is null until the publisher has decided."""

    def ask(conn: sa.Connection) -> dict[str, Any]:
        request = ask_for_version(
            conn,
            policy,
            body.version,
            verb,
            source="api",
            note=body.note,
            even_if_rejected=body.even_if_rejected,
        )
        return asdict(request)

    return await context.write(ask)


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
