"""Curation: pages of episodes, and second thoughts about episodes, calls and answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ...records import CallKind, EpisodeStatus, Purpose
from ...store.curation import (
    assign_calls,
    include_episode,
    set_call_kind,
    set_choice_used,
    tag_episode,
    untag_episode,
)
from ...store.listing import MAX_PAGE, EpisodeFilter, list_episodes, list_unattributed
from ...store.names import checked_tag_key
from .context import ChoiceIndex, Context, Name, TimeMs

router = APIRouter(prefix="/lightning/api", tags=["curation"])


TagKey = Annotated[str, AfterValidator(checked_tag_key)]


class Note(BaseModel):
    """Why; kept with the event."""

    model_config = ConfigDict(extra="forbid")

    note: str | None = None


class Tags(Note):
    """Tags to set, and keys to take off."""

    set: dict[TagKey, str] = Field(default_factory=dict)
    remove: list[str] = Field(default_factory=list)


class Assignment(Note):
    """Calls of the unattributed bin that belong to the episode."""

    calls: list[str] = Field(min_length=1)
    agent: Name | None = None
    create: bool = Field(False, description="Whether an episode that is not there yet is made.")


class Kind(Note):
    """What the call is."""

    kind: CallKind


class Use(Note):
    """Whether the episode went on with this answer."""

    used: bool


@router.get("/episodes")
async def list_page(
    context: Context,
    *,
    task: str | None = None,
    batch: str | None = None,
    status: EpisodeStatus | None = None,
    purpose: Purpose | None = None,
    policy: str | None = None,
    agent: str | None = None,
    unrewarded: bool = False,
    since_ms: TimeMs | None = None,
    until_ms: TimeMs | None = None,
    limit: int = Query(50, ge=1, le=MAX_PAGE),
    after: str | None = None,
) -> dict[str, Any]:
    wanted = EpisodeFilter(
        task=task,
        batch=batch,
        status=status,
        purpose=purpose,
        policy=policy,
        agent=agent,
        since_ms=since_ms,
        until_ms=until_ms,
        unrewarded=unrewarded,
    )
    page = await context.read(lambda conn: list_episodes(conn, wanted, limit=limit, after=after))
    return {"episodes": [asdict(row) for row in page.rows], "next": page.next}


@router.get("/unattributed")
async def unattributed(
    context: Context, limit: int = Query(50, ge=1, le=MAX_PAGE), after: str | None = None
) -> dict[str, Any]:
    page = await context.read(lambda conn: list_unattributed(conn, limit=limit, after=after))
    return {"calls": [asdict(row) for row in page.rows], "next": page.next}


@router.post("/episodes/{episode:path}/include")
async def include(episode: str, context: Context, body: Note | None = None) -> dict[str, str]:
    note = None if body is None else body.note
    await context.write(lambda conn: include_episode(conn, episode, by="api", note=note))
    return {"episode": episode, "status": EpisodeStatus.ENDED.value}


@router.post("/episodes/{episode:path}/tags")
async def tag(episode: str, context: Context, body: Tags) -> dict[str, str]:
    def change(conn: Any) -> None:
        tag_episode(conn, episode, body.set, by="api", note=body.note)
        untag_episode(conn, episode, body.remove, by="api", note=body.note)

    await context.write(change)
    return {"episode": episode}


@router.post("/episodes/{episode:path}/calls")
async def assign(episode: str, context: Context, body: Assignment) -> dict[str, Any]:
    ordinals = await context.write(
        lambda conn: assign_calls(
            conn, episode, body.calls, agent=body.agent, create=body.create, by="api", note=body.note
        )
    )
    return {"episode": episode, "ordinals": ordinals}


@router.post("/calls/{call}/kind")
async def kind(call: str, context: Context, body: Kind) -> dict[str, Any]:
    await context.write(lambda conn: set_call_kind(conn, [call], body.kind, by="api", note=body.note))
    return {"call": call, "kind": body.kind}


@router.post("/calls/{call}/choices/{index}/used")
async def use(call: str, index: ChoiceIndex, context: Context, body: Use) -> dict[str, Any]:
    await context.write(lambda conn: set_choice_used(conn, call, index, body.used, by="api", note=body.note))
    return {"call": call, "choice": index, "used": body.used}
