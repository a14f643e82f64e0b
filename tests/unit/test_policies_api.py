"""Promote and roll back over HTTP: the same rows as the command line writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes.policy_behaviours import a_version
from fakes.running_proxy import Running, ask, running_proxy

from lightning_rl.records import VersionStatus
from lightning_rl.store.policies import add_candidate, set_version_status


def post(running: Running, path: str, doc: dict[str, Any]) -> tuple[int, Any]:
    answer = ask(running.url, f"/lightning/api/policies/{path}", json.dumps(doc).encode())
    return answer.status, json.loads(answer.body)


def test_a_version_is_asked_for_and_mistakes_are_refused(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as running:
        for number in (1, 2):
            with running.database.write() as conn:
                add_candidate(conn, a_version(number))
                set_version_status(conn, "policy", number, VersionStatus.LIVE, source="publisher")
        status, asked = post(running, "policy/rollback", {"version": 0, "note": "worse"})
        assert (status, asked["version"], asked["from_version"], asked["outcome"]) == (202, 0, 2, None)
        status, mistake = post(running, "policy/promote", {"version": 9})
        assert (status, mistake["error"]["message"][:38]) == (400, "there is no version 9 of policy 'polic")
        assert post(running, "nobody/rollback", {})[0] == 400
        assert post(running, "policy/promote", {})[0] == 422
        assert post(running, "policy/promote", {"version": 2**40})[0] == 422
        shown = json.loads(ask(running.url, "/lightning/api/policies/policy/requests").body)
        assert [(one["id"], one["source"], one["note"]) for one in shown["requests"]] == [
            (asked["id"], "api", "worse")
        ]
