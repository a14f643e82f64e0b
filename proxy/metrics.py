"""What was recorded, in numbers: for Prometheus, and for the status page. Since this process began.

Counted where the log is written, batch by batch in the recorder's thread, and only what is committed: the hot
path pays nothing. prometheus_client is asked only when somebody reads the numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..records import MALFORMED_MARK, CallEnd, CallIntent, LogEntry
from ..store.append import Noted

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_SEC = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_OPEN = 100_000

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(slots=True)
class _Times:
    """A histogram: how many fell at or below each bucket's bound but above the one before, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_SEC) + 1))
    total_sec: float = 0.0

    def add(self, sec: float) -> None:
        self.counts[bisect_left(BUCKETS_SEC, sec)] += 1
        self.total_sec += sec


class CallMetrics:
    """`observe` in the recorder's thread, everything else in any."""

    def __init__(self) -> None:
        self.num_unattributed = 0
        self.num_conflicts = 0  # between two marks, or with what the episode had said
        self.num_malformed = 0  # marks that can't be names
        self.num_late = 0  # calls on episodes that had ended
        self.num_retries = 0
        self._calls: Counter[tuple[str, str, str]] = Counter()  # (route, dialect, status)
        self._quarantined: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()  # "prompt" | "completion"
        self._first_byte: dict[str, _Times] = {}  # by dialect
        self._total: dict[str, _Times] = {}
        self._open: dict[str, CallIntent] = {}

    def observe(self, entries: Sequence[LogEntry], noted: Noted | None) -> None:
        """A batch is in the log."""
        for entry in entries:
            if isinstance(entry, CallIntent):
                self._add_intent(entry)
            elif isinstance(entry, CallEnd):
                self._add_end(entry)
        if noted is not None:
            self.num_late += noted.num_late_calls
            self.num_retries += noted.num_retries

    def _add_intent(self, intent: CallIntent) -> None:
        if len(self._open) >= MAX_OPEN:  # of calls that never got an end; a bound, no more
            del self._open[next(iter(self._open))]
        self._open[intent.id] = intent
        if intent.attribution.episode_id is None:
            self.num_unattributed += 1
        conflict = intent.attribution.conflict
        if conflict is not None:
            is_malformed = conflict.startswith(MALFORMED_MARK)
            self.num_malformed += is_malformed
            self.num_conflicts += not is_malformed or "; " in conflict

    def _add_end(self, end: CallEnd) -> None:
        intent = self._open.pop(end.call_id, None)
        route, dialect = ("", "other") if intent is None else (intent.route, intent.dialect)
        self._calls[route, dialect, end.status.value] += 1
        if end.prompt_ids is not None:
            self._tokens["prompt"] += len(end.prompt_ids)
        for choice in end.choices:
            if choice.completion_ids is not None:
                self._tokens["completion"] += len(choice.completion_ids)
            if choice.quarantine is not None:
                self._quarantined[choice.quarantine.value] += 1
        if intent is not None:
            started = intent.started_at_ms
            if end.first_byte_at_ms is not None:
                self._times(self._first_byte, dialect).add((end.first_byte_at_ms - started) / 1000)
            self._times(self._total, dialect).add((end.ended_at_ms - started) / 1000)

    def _times(self, of: dict[str, _Times], dialect: str) -> _Times:
        found = of.get(dialect)
        if found is None:
            found = of[dialect] = _Times()
        return found

    # --- what is read ---

    def counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        calls = CounterMetricFamily(
            "lightning_calls", "Calls in the log with their answer.", labels=("route", "dialect", "status")
        )
        for labels, count in dict(self._calls).items():
            calls.add_metric(labels, count)
        yield calls
        for name, about, label, counter in (
            ("lightning_tokens", "Exact tokens recorded.", "kind", self._tokens),
            ("lightning_quarantined_choices", "Recorded, not trainable.", "reason", self._quarantined),
        ):
            family = CounterMetricFamily(name, about, labels=(label,))
            for value, count in dict(counter).items():
                family.add_metric((value,), count)
            yield family
        for name, about, total in (
            ("lightning_unattributed_calls", "Calls that no mark gave an episode.", self.num_unattributed),
            ("lightning_attribution_conflicts", "Calls whose marks disagree.", self.num_conflicts),
            ("lightning_malformed_marks", "Calls with a mark that can't be a name.", self.num_malformed),
            ("lightning_late_calls", "Calls on episodes that had ended.", self.num_late),
            ("lightning_retries", "Calls that repeat an earlier attempt.", self.num_retries),
        ):
            yield CounterMetricFamily(name, about, value=total)

    def histograms(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        for name, about, times in (
            (
                "lightning_first_byte_seconds",
                "From the request to the answer's first byte.",
                self._first_byte,
            ),
            ("lightning_call_seconds", "From the request to the answer's end.", self._total),
        ):
            family = HistogramMetricFamily(name, about, labels=("dialect",))
            for dialect, found in dict(times).items():
                counts, so_far = list(found.counts), 0
                buckets: list[tuple[str, float]] = []
                for bound, count in zip((*BUCKETS_SEC, "+Inf"), counts, strict=True):
                    so_far += count
                    buckets.append((str(bound), so_far))
                family.add_metric((dialect,), buckets, found.total_sec)
            yield family


def render(collect: Callable[[], Iterator[Metric]]) -> bytes:
    """In Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return collect()

    registry = CollectorRegistry()
    registry.register(Once())
    return generate_latest(registry)
