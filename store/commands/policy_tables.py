"""Policies, versions and their comparison as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .tables import count_words, in_words, print_table, terminal
from .times import shown

if TYPE_CHECKING:
    from ..policy_view import Comparison, PolicyLine, PolicyView, TrainedOn, VersionFacts, VersionView
    from ..served import Mean

_SHOWN_REQUESTS = 5

_POLICY_TITLES = ("policy", "live", "kind", "versions", "calls", "episodes", "reward")
_VERSION_TITLES = (
    *("version", "status", "live since", "run/step", "trained on", "calls", "episodes", "reward"),
    *("tokens/call", "verdict"),
)


def print_policies(found: Sequence[PolicyLine]) -> None:
    rows = [
        (
            line.policy,
            _number(line.live_version),
            line.kind or "-",
            str(line.num_versions),
            str(line.num_calls),
            str(line.num_episodes),
            mean_words(line.reward),
        )
        for line in found
    ]
    print_table(_POLICY_TITLES, rows)


def print_policy(view: PolicyView) -> None:
    console = terminal()
    console.print(f"policy {view.policy}: {_number(view.live_version)} is live")
    console.print()
    if view.versions:
        print_table(_VERSION_TITLES, [_version_row(facts) for facts in view.versions])
    if view.requests:
        console.print()
        rows = [
            (
                shown(request.created_at_ms),
                f"{request.verb} {request.from_version} -> {request.version}",
                request.source,
                request.outcome or "waits",
                request.note or "",
            )
            for request in view.requests[-_SHOWN_REQUESTS:]
        ]
        print_table(("asked", "what", "by", "outcome", "note"), rows)


def print_version(view: VersionView) -> None:
    facts = view.facts
    lines: list[tuple[str, Any]] = [
        ("policy", view.policy),
        ("version", _number(facts.version)),
        ("status", facts.status),
        ("kind", facts.kind or "-"),
        ("live since", shown(facts.live_at_ms)),
        ("verdict", facts.words),
        ("made by", _made_by(facts)),
        ("trained on", _trained_words(facts.trained_on)),
        ("its step changed", _change_words(facts)),
        ("folder", facts.path or "-"),
        (
            "calls",
            f"{facts.served.num_calls} complete, in {count_words(facts.served.num_episodes, 'episode')}",
        ),
        ("reward", mean_words(facts.served.reward)),
        (
            "tokens per call",
            f"{_short(facts.served.completion_tokens)} after {_short(facts.served.prompt_tokens)}",
        ),
        ("calls per episode", mean_words(facts.served.turns)),
    ]
    print_table(("", ""), lines)
    if view.events:
        terminal().print()
        rows = [
            (shown(event.at_ms), event.status, event.source, event.note or _reason(event.value))
            for event in view.events
        ]
        print_table(("when", "status", "by", "why"), rows)


def print_comparison(found: Comparison) -> None:
    console, a, b = terminal(), found.a, found.b
    rows = [
        ("status", a.status, b.status, ""),
        ("verdict", a.words, b.words, ""),
        ("made by", _made_by(a), _made_by(b), ""),
        ("trained on", _trained_words(a.trained_on), _trained_words(b.trained_on), ""),
        ("its step changed", _change_words(a), _change_words(b), ""),
        _counted("episodes", a.served.num_episodes, b.served.num_episodes),
        _counted("calls", a.served.num_calls, b.served.num_calls),
        (
            "reward",
            mean_words(a.served.reward),
            mean_words(b.served.reward),
            delta_words(a.served.reward, b.served.reward),
        ),
        _plain("tokens per call", a.served.completion_tokens, b.served.completion_tokens),
        _plain("prompt tokens per call", a.served.prompt_tokens, b.served.prompt_tokens),
        (
            "calls per episode",
            mean_words(a.served.turns),
            mean_words(b.served.turns),
            delta_words(a.served.turns, b.served.turns),
        ),
        (
            "tokens per episode",
            mean_words(a.served.tokens),
            mean_words(b.served.tokens),
            delta_words(a.served.tokens, b.served.tokens),
        ),
    ]
    print_table((found.policy, _number(a.version), _number(b.version), "difference"), rows)
    if found.parts:
        console.print()
        title = f"reward by {found.by}{_left_out(found)}"
        titles = (title, _number(a.version), _number(b.version), "difference")
        print_table(
            titles,
            [
                (part.name or "-", mean_words(part.a), mean_words(part.b), delta_words(part.a, part.b))
                for part in found.parts
            ],
        )
    elif found.num_of_one:
        console.print(f"\nreward by {found.by}: {found.num_of_one} of one version only, none of both")
    if found.settings:
        console.print()
        rows_of = [(key, in_words(old), in_words(new), "") for key, (old, new) in found.settings.items()]
        print_table(("settings of their runs", _number(a.version), _number(b.version), ""), rows_of)


def _left_out(found: Comparison) -> str:
    said = []
    if found.num_parts > len(found.parts):
        said.append(f"the {len(found.parts)} of {found.num_parts} that differ most")
    if found.num_of_one:
        said.append(f"{found.num_of_one} of one version only")
    return f" ({'; '.join(said)})" if said else ""


def mean_words(found: Mean) -> str:
    """ "0.42 ±0.03 (120)": the mean, its standard error, and of how many."""
    if found.mean is None:
        return "-"
    error = "" if found.se is None else f" ±{found.se:.2g}"
    return f"{_short(found.mean)}{error} ({found.num})"


def delta_words(a: Mean, b: Mean) -> str:
    if a.mean is None or b.mean is None:
        return ""
    error = "" if a.se is None or b.se is None else f" ±{(a.se**2 + b.se**2) ** 0.5:.2g}"
    return f"{b.mean - a.mean:+.3g}{error}"


def _version_row(facts: VersionFacts) -> tuple[str, ...]:
    return (
        str(facts.version),
        facts.status,
        shown(facts.live_at_ms),
        _made_by(facts),
        _trained_words(facts.trained_on),
        str(facts.served.num_calls),
        str(facts.served.num_episodes),
        mean_words(facts.served.reward),
        _short(facts.served.completion_tokens),
        facts.words,
    )


def _counted(name: str, a: int, b: int) -> tuple[str, ...]:
    return name, str(a), str(b), f"{b - a:+d}"


def _plain(name: str, a: float | None, b: float | None) -> tuple[str, ...]:
    delta = "" if a is None or b is None else f"{b - a:+.3g}"
    return name, _short(a), _short(b), delta


def _number(version: int) -> str:
    return "0 (base model)" if version == 0 else str(version)


def _made_by(facts: VersionFacts) -> str:
    return "-" if facts.run_id is None else f"{facts.run_id[:12]}/{facts.step}"


def _trained_words(found: TrainedOn | None) -> str:
    if found is None:
        return "-"
    parts = (
        count_words(found.num_episodes, "episode"),
        count_words(found.num_groups, "group"),
        count_words(found.num_choices, "choice"),
    )
    return f"{', '.join(parts)} from {found.from_version}"


def _change_words(facts: VersionFacts) -> str:
    found = facts.probe
    if found is None:
        return "-"
    return f"KL {found.kl:.2g}, rms {found.rms:.2g} nats over {count_words(found.num_tokens, 'probe token')}"


def _reason(value: Any) -> str:
    return str(value.get("reason", "")) if isinstance(value, dict) else ""


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
