"""From settings and the log to one step's plan: what the dry run and the training run share, so that they
cannot differ.

Reads the log; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...errors import SettingsError
from ...records import Group
from ...settings.train import TrainSettings
from ...store.database import Database
from ...store.history import ended_episodes
from ...store.rewards import resolve
from ..credit.base import CreditContext, PastEpisode, Values
from ..credit.registry import configure
from .context_length import context_tokens
from .plan import PlanSettings, StepPlan, plan_step
from .selection import SelectionRules, judge_group
from .source import GroupSource

NO_VALUES: Values = {}


def plan_settings(settings: TrainSettings) -> PlanSettings:
    """SettingsError where the credit rule or an option of it does not exist, or two settings exclude each
    other."""
    if settings.from_base and settings.max_staleness is not None:
        raise SettingsError(
            "--from-base and --max-staleness exclude each other: versions in the log count no steps from it"
        )
    if settings.lr_schedule != "constant" and settings.max_steps is None:
        raise SettingsError(
            f"lr_schedule = {settings.lr_schedule} has to know where it ends: give --max-steps, or use "
            "--lr-schedule constant"
        )
    selection = SelectionRules(
        policy=settings.policy,
        unrewarded=settings.unrewarded,
        max_staleness=settings.max_staleness,
        failed=settings.failed,
        unequal_sources=settings.unequal_sources,
        source_weights=settings.sources,
        train_agents=frozenset(settings.train_agents),
        max_sequence_tokens=settings.max_sequence_tokens or context_tokens(settings.model),
        too_long=settings.too_long,
    )
    return PlanSettings(selection, configure(settings.credit), settings.weighting, settings.constant_tokens)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the steps of one run."""

    database: Database
    run_id: str
    settings: PlanSettings
    source: GroupSource

    @classmethod
    def of(cls, database: Database, settings: TrainSettings, run_id: str) -> Self:
        planning = plan_settings(settings)
        source = GroupSource(
            database,
            settings.policy,
            run_id,
            settings.groups_per_step,
            # From the base model nothing of the log is trained yet; from a live version, what made it is.
            again=settings.from_base,
            fewest_episodes=planning.credit.fewest_episodes,
        )
        return cls(database, run_id, planning, source)

    def plan(
        self, groups: Sequence[Group], *, step: int, from_version: int, values: Values = NO_VALUES
    ) -> StepPlan:
        """`values`: a critic's, by call id, for rules that read them."""
        history = self._history() if "history" in self.settings.credit.reads else ()
        return plan_step(
            groups,
            self.settings,
            run_id=self.run_id,
            step=step,
            from_version=from_version,
            context=CreditContext(values, history),
        )

    @property
    def reads_values(self) -> bool:
        """Whether the credit rule needs a critic."""
        return "values" in self.settings.credit.reads

    def value_targets(self, groups: Sequence[Group], values: Values) -> dict[str, float]:
        """What a critic should have said of the step's calls, by call id."""
        judged = [judge_group(group, self.settings.selection) for group in groups]
        return self.settings.credit.value_targets(judged, values)

    def _history(self) -> list[PastEpisode]:
        selection = self.settings.selection
        with self.database.read() as conn:
            ended = ended_episodes(conn, selection.policy)
        found = []
        for past in ended:
            value = resolve(past.rewards, selection.source_weights).value
            if value is not None:
                found.append(PastEpisode(past.id, past.task_id, past.tags, past.ended_at_ms, value))
        return found
