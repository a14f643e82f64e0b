"""Policy versions, runs and step manifests: what was trained from which rows."""

from __future__ import annotations

import zlib

import sqlalchemy as sa

from ...records import VersionStatus
from ..bodies import unpack_json
from ..schema import choices, episodes, manifest_choices, manifest_episodes, policy_versions, rewards, runs
from ..statements import existing
from .episodes import newest_events
from .report import REPORT, RESTORE, Findings

_STATUSES = tuple(status.value for status in VersionStatus)


def check_versions(conn: sa.Connection, findings: Findings) -> None:
    for page in findings.pages(conn, "policy_versions", sa.select(policy_versions)):
        names = [f"{row.policy}/{row.version}" for row in page]
        newest = newest_events(conn, "policy_version", names, _STATUSES)
        for name, row in zip(names, page, strict=True):
            if row.status != newest.get(name):
                what = f"its status is {row.status}, its newest event says {newest.get(name, 'nothing')}"
                findings.fault("policy_versions", name, what, REPORT)
            try:
                if row.probe is not None:
                    unpack_json(row.probe)
            except (zlib.error, ValueError):
                findings.fault("policy_versions", name, "its probe can't be unpacked", RESTORE)


def check_manifests(conn: sa.Connection, findings: Findings) -> None:
    """A manifest outlives its episodes: what was trained stays known when they are deleted."""
    runs_checked = conn.execute(sa.select(sa.func.count()).select_from(runs)).scalar_one()
    findings.checked("runs", runs_checked)
    _check_manifest_episodes(conn, findings)
    _check_manifest_choices(conn, findings)


def _check_manifest_episodes(conn: sa.Connection, findings: Findings) -> None:
    query = sa.select(manifest_episodes, episodes.c.id.label("found")).outerjoin(
        episodes, episodes.c.id == manifest_episodes.c.episode_id
    )
    for page in findings.pages(conn, "manifest_episodes", query):
        there = existing(conn, rewards.c.id, {name for row in page for name in row.reward_ids})
        for row in page:
            if row.found is None:
                findings.notes["manifest_episodes_deleted_since"] += 1
                continue
            for name in row.reward_ids:
                if name not in there:
                    key = (row.run_id, row.step, row.episode_id)
                    what = f"the reward {name!r} that it was trained with is missing"
                    findings.fault("manifest_episodes", key, what, RESTORE)


def _check_manifest_choices(conn: sa.Connection, findings: Findings) -> None:
    query = (
        sa.select(manifest_choices, choices.c.call_id.label("found"), episodes.c.id.label("found_episode"))
        .outerjoin(
            choices,
            sa.and_(
                choices.c.call_id == manifest_choices.c.call_id,
                choices.c.index == manifest_choices.c.choice_index,
            ),
        )
        .outerjoin(episodes, episodes.c.id == manifest_choices.c.episode_id)
    )
    for page in findings.pages(conn, "manifest_choices", query):
        for row in page:
            if row.found is None and row.found_episode is not None:
                key = (row.run_id, row.step, row.call_id, row.choice_index)
                findings.fault("manifest_choices", key, "the choice that it trained is missing", RESTORE)
