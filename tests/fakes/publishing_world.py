"""A database, an engine and a publisher, without a proxy in front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.fake_engine import PROBED, FakeEngine, model_logprobs, write_folder
from fakes.own_gate import OwnGate

from lightning_rl.proxy.live.engines import Engines
from lightning_rl.proxy.live.gate import Gate
from lightning_rl.proxy.live.policies import LivePolicies
from lightning_rl.proxy.publishing.place import Handle, Place
from lightning_rl.proxy.publishing.publisher import Publisher
from lightning_rl.records import (
    PolicyVersion,
    ProbeSequence,
    StepManifest,
    VersionStatus,
    WeightsKind,
    now_ms,
)
from lightning_rl.settings.proxy import ProxySettings
from lightning_rl.store.database import Database
from lightning_rl.store.policies import add_candidate, load_version
from lightning_rl.store.policy_requests import PolicyRequest, load_request
from lightning_rl.store.promotion import ask_for_version
from lightning_rl.store.runs import add_manifest, create_run, finish_step


class World:
    """A database, an engine, a publisher, and ways to look at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_folder(folder / "base", 0.0)
        self.engine = FakeEngine(folder / "base")
        self.database = Database.open(f"sqlite:///{folder / 'log.db'}")
        self.restart_proxy()

    def restart_proxy(self, **said: Any) -> None:
        settings = ProxySettings.load(publish_poll_sec=0.001, **said)
        self.live = LivePolicies("policy", {}, Gate(), agent_policies=settings.agent_policies)
        self.engines = Engines(settings.engine_url)
        handles = [Handle(self.engine, self.engines.all[0])]
        place = Place(handles, self.engines, self.live, OwnGate(self.live), hold_timeout_sec=0.2)
        self.publisher = Publisher(self.database, place, settings)
        self.publisher.rotation.hurry()

    def candidate(
        self,
        version: int,
        weight: float,
        before: float,
        kind: WeightsKind = WeightsKind.FULL,
        *,
        policy: str = "policy",
        parent: int | None = None,
        **changes: Any,
    ) -> PolicyVersion:
        """`parent`: a step of a run made it from that version."""
        path = self.folder / f"{policy}-{version}"
        checksum = write_folder(path, weight, is_adapter=kind is WeightsKind.LORA)
        probe = tuple(
            ProbeSequence(ids, model_logprobs(before, ids), model_logprobs(weight, ids)) for ids in PROBED
        )
        fields: dict[str, Any] = {
            "status": VersionStatus.CANDIDATE,
            "path": str(path),
            "checksum": checksum,
            "probe": probe,
            "base_model": None,
            "run_id": None,
            "step": None,
            "created_at_ms": now_ms(),
        }
        with self.database.write() as conn:
            if parent is not None:
                run = f"run-{policy}-{version}"
                fields |= {"run_id": run, "step": 0}
                create_run(conn, run, policy, {}, {})
                add_manifest(conn, StepManifest(run, 0, policy, parent, (), {}, {}))
                finish_step(conn, run, 0, to_version=version, metrics={})
            row = PolicyVersion(policy=policy, version=version, kind=kind, **(fields | changes))
            add_candidate(conn, row)
        return row

    def row(self, version: int, policy: str = "policy") -> PolicyVersion:
        with self.database.read() as conn:
            found = load_version(conn, policy, version)
        assert found is not None
        return found

    def status(self, version: int, policy: str = "policy") -> VersionStatus:
        return self.row(version, policy).status

    def ask(self, version: int | None, policy: str = "policy", **said: Any) -> PolicyRequest:
        """As `lightning policy rollback` does."""
        with self.database.write() as conn:
            return ask_for_version(conn, policy, version, "rollback", source="ann", **said)

    def outcome(self, request: PolicyRequest) -> PolicyRequest:
        with self.database.read() as conn:
            found = load_request(conn, request.id)
        assert found is not None
        return found

    async def steps(self, number: int = 1) -> None:
        for _ in range(number):
            self.publisher.rotation.hurry()
            await self.publisher.step()
            assert self.live.gate.is_open
