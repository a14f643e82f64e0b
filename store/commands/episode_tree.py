"""An episode as a tree on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from .tables import count_words, in_words, terminal
from .times import shown

if TYPE_CHECKING:
    from ...records import Reward
    from ..episode_view import CallFacts, CallView, EpisodeView, EventFacts

_ORDINARY_EVENTS = frozenset({"created"})


def print_view(view: EpisodeView) -> None:
    console = terminal()
    for text in _head(view):
        console.print(text)
    if view.calls:
        console.print(_tree(view))
    for title, lines in (
        ("rewards", [_reward(reward) for reward in view.rewards]),
        ("events", [_event(event) for event in view.events if event.kind not in _ORDINARY_EVENTS]),
    ):
        if lines:
            console.print(Text(title, "bold"))
            for line in lines:
                console.print(Text(f"  {line}"))


def print_call(view: CallView) -> None:
    console = terminal()
    call = view.call
    whose = "in no episode" if view.episode_id is None else f"of episode {view.episode_id}"
    console.print(Text(f"call {call.id}, {whose}", "bold"))
    mark = "no mark" if call.attribution_rule == "none" else f"mark {call.attribution_rule}"
    answered = "" if call.http_status is None else f", answered {call.http_status}"
    console.print(Text(f"  begun {shown(call.started_at_ms)} on {call.route}{answered}, {mark}"))
    console.print(Text("  ") + _call(call))
    for event in view.events:
        console.print(Text(f"  {_event(event)}"))


def _head(view: EpisodeView) -> Iterator[Text]:
    line = view.line
    yield Text(f"episode {line.id}", "bold")
    ended = "" if line.ended_at_ms is None else f" at {shown(line.ended_at_ms)} by {line.ended_by}"
    yield Text(f"  {line.status}{ended}, begun {shown(line.created_at_ms)}, for {line.purpose}")
    task = "no task" if line.task_id is None else f"task {line.task_id}"
    yield Text(f"  {task}" + (f", batch {line.batch}" if line.batch else ""))
    if line.policy is not None:
        yield Text(f"  policy {line.policy}, began with version {line.policy_version}")
    if line.tags:
        yield Text("  tags " + " ".join(f"{key}={value}" for key, value in line.tags.items()))
    if line.has_gap:
        yield Text("  has a gap: a call was served but not recorded, so it is never trained", "red")
    value = "none" if view.resolution.value is None else f"{view.resolution.value:g}"
    yield Text(f"  reward {value}: {view.resolution.path}")
    if view.trained_in:
        yield Text(
            "  in the manifests of " + ", ".join(f"{run} step {step}" for run, step in view.trained_in)
        )


def _tree(view: EpisodeView) -> Tree:
    answered = sum(choice.num_tokens for call in view.calls for choice in call.choices)
    prompted = sum(call.num_prompt_tokens or 0 for call in view.calls)
    root = Tree(Text(f"{count_words(len(view.calls), 'call')}, {prompted} tokens in, {answered} out", "bold"))
    at_depth = [root]
    for call in view.calls:
        del at_depth[call.depth + 1 :]
        at_depth.append(at_depth[call.depth].add(_call(call)))
    return root


def _call(call: CallFacts) -> Text:
    text = Text(f"#{'-' if call.ordinal is None else call.ordinal} ")
    text.append(f"{call.agent or 'agent'} ", "cyan" if call.agent else "dim")
    if call.kind != "policy":
        text.append(f"[{call.kind}] ", "magenta")
    tokens_in = "?" if call.num_prompt_tokens is None else call.num_prompt_tokens
    answers = [f"{choice.num_tokens} out, {choice.finish_reason or 'unfinished'}" for choice in call.choices]
    text.append(f"{tokens_in} in -> {' | '.join(answers) or 'no answer'}")
    text.append(f", {_version(call)}")
    if call.status != "complete":
        text.append(f", {call.status}", "red")
    if call.delivered is False:
        text.append(", not delivered", "yellow")
    for choice in call.choices:
        if choice.quarantine is not None:
            text.append(f", choice {choice.index} not trainable: {choice.quarantine}", "yellow")
        if choice.used is not None:
            text.append(f", choice {choice.index} {'used' if choice.used else 'not used'}")
    for note in (call.unrecordable, call.attribution_conflict, call.error):
        if note is not None:
            text.append(f", {note}", "yellow")
    if call.retry_of is not None:
        text.append(f", repeats {call.retry_of}")
    text.append(f"  {call.id}", "dim")
    return text


def _version(call: CallFacts) -> str:
    if call.policy is None:
        return "no policy of ours"
    changed = call.policy_version_end not in (None, call.policy_version)
    return f"{call.policy}/{call.policy_version}" + (f"->{call.policy_version_end}" if changed else "")


def _reward(reward: Reward) -> str:
    about = {"agent": reward.agent, "call": reward.call_id, "tokens": reward.call_id}.get(reward.target)
    parts = [f"{reward.value:g} from {reward.source} about {reward.target}" + (f" {about}" if about else "")]
    if reward.token_start is not None:
        parts.append(f"tokens {reward.token_start} to {reward.token_end}")
    if reward.supersedes is not None:
        parts.append(f"supersedes {reward.supersedes}")
    if reward.note:
        parts.append(reward.note)
    return ", ".join(parts) + f"  {reward.id}, {shown(reward.created_at_ms)}"


def _event(event: EventFacts) -> str:
    said = "" if event.value is None else f" {in_words(event.value)}"
    note = f": {event.note}" if event.note else ""
    about = "" if event.subject == "episode" else f" {event.subject} {event.subject_id}"
    return f"{shown(event.created_at_ms)} {event.kind}{about}{said}, by {event.source}{note}"
