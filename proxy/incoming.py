"""What an exchange starts from: the parts that all of them share, the request's head, the row of intent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from ..records import Attribution, CallEnd, CallIntent, CallKind, LogEntry, new_id, now_ms
from .attribution.address import Address
from .attribution.inference import Inference
from .attribution.kinds import Kinds
from .attribution.lineage import Lineage, digest
from .live.engines import Engines
from .live.served import Lease, Served
from .messages.request import Request
from .routes import Route
from .transport.client import Client
from .transport.headers import Headers
from .transport.upstream import Upstream


class CallRecorder(Protocol):
    """The slice of recorder.Recorder that calls use."""

    @property
    def refusal(self) -> str | None: ...

    def put(self, entry: LogEntry) -> None: ...

    async def committed(self, entry: CallEnd) -> None: ...


class CallFront(Protocol):
    """Who answers calls that the engine is not to be asked as they are (dialects/, providers/)."""

    def takes(self, request: Request) -> bool: ...

    async def serve(
        self, client: Client, incoming: Incoming, request: Request, attribution: Attribution
    ) -> None: ...


class CallPolicies(Protocol):
    """The slice of live/policies.py (or live/trial.py) that calls use."""

    @property
    def base_model(self) -> str | None: ...

    async def admit(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Lease: ...

    def resolve(
        self, requested_model: str | None, episode_id: str | None, agent: str | None = None
    ) -> Served: ...

    def visible_models(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What every exchange needs."""

    live: CallPolicies
    recorder: CallRecorder
    upstream: Upstream
    engines: Engines
    lineage: Lineage
    holds_ends: bool  # durability "commit"
    front: CallFront | None = None
    kinds: Kinds = field(default_factory=Kinds)
    inference: Inference | None = None  # None: switched off
    evaluation_episode: str | None = None
    """Where all calls are an evaluation's: the episode of those that name none."""
    long_answers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Whole answers of megabytes are read one after the other."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request's head, read: what it asks for and in whose name."""

    route: Route
    address: Address
    headers: Headers
    path_and_query: str  # for the engine

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    def retry_count(self) -> int:
        """How often the SDK has tried before, as it says itself; what can't be a count is none."""
        said = self.header(b"x-stainless-retry-count") or ""
        return int(said) if len(said) < 10 and said.isascii() and said.isdigit() else 0


def make_intent(
    parts: Parts,
    incoming: Incoming,
    request: Request,
    attribution: Attribution,
    lease: Lease,
) -> CallIntent:
    """The row of a call to an engine."""
    served, engine = lease.served, lease.engine
    assert engine is not None, "serve_call has chosen one"
    return intent_of(
        parts,
        incoming,
        request,
        attribution,
        kind=parts.kinds.of(attribution.agent, request.doc),
        served_model=served.model or request.model,
        policy=served.policy,
        policy_version=served.version,
        engine_url=engine.url,
        fingerprint_id=engine.fingerprint_id,
        unrecordable=request.unrecordable,
    )


def intent_of(
    parts: Parts,
    incoming: Incoming,
    request: Request,
    attribution: Attribution,
    *,
    kind: CallKind,
    served_model: str | None,
    engine_url: str,
    unrecordable: str | None,
    policy: str | None = None,
    policy_version: int | None = None,
    fingerprint_id: str | None = None,
) -> CallIntent:
    """The row of a call, whoever answers it. Takes its place in the lineage."""
    call_id = new_id()
    parent, state_key = parts.lineage.place(attribution.episode_id, call_id, request.doc)
    return CallIntent(
        id=call_id,
        attribution=attribution,
        kind=kind,
        route=incoming.route.path,
        dialect=request.dialect,
        streaming=request.streaming,
        requested_model=request.model,
        served_model=served_model,
        policy=policy,
        policy_version=policy_version,
        engine_url=engine_url,
        fingerprint_id=fingerprint_id,
        sampling=request.sampling,
        request_body=request.body,
        request_hash=digest(request.body),
        state_key=state_key,
        parent_call_id=parent,
        unrecordable=unrecordable,
        idempotency_key=incoming.header(b"idempotency-key"),
        retry_count=incoming.retry_count(),
        started_at_ms=now_ms(),
        client_keys=incoming.address.keys,
    )
