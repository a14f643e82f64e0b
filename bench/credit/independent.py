"""Advantages of every credit rule, a second time.

Written from the formulas in docs/credit.md alone, without having seen any code of the product, so that two
readings of the same document can be compared number by number. Nothing here is fast or general.

Input is one optimizer step as plain dictionaries; output is one float per call id, or None where a rule gives
no advantage. `state` of a call is taken as given, whatever the option `state` says. The key `tag:NAME` of
running_baseline is refused, for the input has no tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import fsum, sqrt
from typing import Any

Episode = dict[str, Any]
Group = dict[str, Any]
Options = dict[str, Any]
Result = dict[str, float | None]

SPREAD: Options = {"std": "sample", "eps": 0.0}
BY_STATE: Options = {"gamma": 0.95, "state": "key"}
CALL_REWARDS: Options = {"call_rewards": True, "call_sources": "equal"}

DEFAULTS: dict[str, Options] = {
    "lightning": SPREAD,
    "grpo": SPREAD,
    "dr_grpo": {},
    "rloo": {},
    "maxrl": {},
    "turn_discount": {"gamma": 0.9, **SPREAD},
    "reinforce_pp": {"gamma": 1.0},
    "reinforce_pp_baseline": {},
    "running_baseline": {"decay": 0.95, "key": "policy", "min_history": 4},
    "gigpo": {"omega": 1.0, **BY_STATE, **SPREAD, **CALL_REWARDS},
    "hgpo": {"depth": 2, "alpha": 1.0, "episode_weight": 0.0, **BY_STATE, **SPREAD, **CALL_REWARDS},
    "step_gae": {"gamma": 0.99, "lam": 0.9, "whiten": "calls", **CALL_REWARDS},
    "intermediate": {"gamma": 1.0, "compare": "position", **SPREAD, **CALL_REWARDS},
    "dr_mas": {"agent_rewards": "replace", **SPREAD},
    "sr_ppo": {"n": 1},
}


def advantages(
    rule: str, options: dict[str, Any], groups: list[dict[str, Any]], history: list[dict[str, Any]]
) -> dict[str, float | None]:
    """The advantage of every call of every episode of the step, or None."""
    unknown = set(options) - set(DEFAULTS[rule])
    if unknown:
        raise ValueError(f"{rule} has no option {sorted(unknown)}")
    chosen = {**DEFAULTS[rule], **options}
    result: Result = {call["id"]: None for g in groups for e in g["episodes"] for call in e["calls"]}
    if rule in BY_GROUP:
        for group in groups:
            episodes = taking_part(group)
            if len(episodes) > 1:  # else a lone survivor, or nobody
                result.update(BY_GROUP[rule](episodes, chosen))
    elif rule == "running_baseline":
        result.update(running_baseline(groups, chosen, history))
    else:
        result.update(BY_STEP[rule](groups, chosen))
    return result


# Conventions of every rule


def taking_part(group: Group) -> list[Episode]:
    return sorted((e for e in group["episodes"] if not e["set_aside"]), key=lambda e: str(e["id"]))


def all_taking_part(groups: list[Group]) -> list[Episode]:
    return sorted((e for g in groups for e in taking_part(g)), key=lambda e: str(e["id"]))


def mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / len(numbers)


def all_equal(numbers: Sequence[float]) -> bool:
    low, high = min(numbers), max(numbers)
    return high - low <= 1e-9 * max(1.0, abs(low), abs(high))


def deviation(numbers: Sequence[float], kind: str) -> float:
    middle = mean(numbers)
    divisor = len(numbers) - (1 if kind == "sample" else 0)
    return sqrt(fsum((x - middle) ** 2 for x in numbers) / divisor)


def normalised(numbers: Sequence[float], options: Options) -> list[float]:
    """(x - mean) / (std + eps) of numbers that are not all equal."""
    middle = mean(numbers)
    if options["std"] == "none":
        return [x - middle for x in numbers]
    scale = deviation(numbers, options["std"]) + options["eps"]
    return [(x - middle) / scale for x in numbers]


def mean_and_variance_by_episode(rows: Sequence[Sequence[float]], divisor: int) -> tuple[float, float]:
    """Each row holds the numbers of one episode, which together weigh one."""
    middle = fsum(mean(row) for row in rows) / len(rows)
    variance = fsum(mean([(x - middle) ** 2 for x in row]) for row in rows) / divisor
    return middle, variance


def rewards(episodes: list[Episode]) -> list[float]:
    return [float(e["reward"]) for e in episodes]


def for_every_step(episodes: list[Episode], numbers: Sequence[float]) -> Result:
    return {call["id"]: x for e, x in zip(episodes, numbers, strict=True) for call in e["calls"]}


# Rules for whole episodes


def whole_episode(rule: str) -> Callable[[list[Episode], Options], Result]:
    """lightning, grpo, dr_grpo, rloo and maxrl: one number for all steps of an episode."""

    def apply(episodes: list[Episode], options: Options) -> Result:
        values = rewards(episodes)
        middle = mean(values)
        if all_equal(values) or (rule == "maxrl" and middle <= 0):
            return {}
        if rule == "dr_grpo":
            numbers = [x - middle for x in values]
        elif rule == "rloo":
            numbers = [x - mean(values[:i] + values[i + 1 :]) for i, x in enumerate(values)]
        elif rule == "maxrl":
            numbers = [(x - middle) / middle for x in values]
        else:
            numbers = normalised(values, options)
        return for_every_step(episodes, numbers)

    return apply


def turn_discount(episodes: list[Episode], options: Options) -> Result:
    result = whole_episode("lightning")(episodes, options)
    for e in episodes:
        for k, call in enumerate(e["calls"]):
            a = result.get(call["id"])
            if a is not None:
                result[call["id"]] = options["gamma"] ** (len(e["calls"]) - 1 - k) * a
    return result


def reinforce_pp(groups: list[Group], options: Options) -> Result:
    episodes = all_taking_part(groups)
    rows: list[list[float]] = []
    for e in episodes:
        steps = len(e["calls"])
        returns = [options["gamma"] ** (steps - 1 - k) * e["reward"] for k in range(steps)]
        rows.append(returns or [e["reward"]])
    if len(rows) < 2 or all_equal([x for row in rows for x in row]):
        return {}
    middle, variance = mean_and_variance_by_episode(rows, len(rows) - 1)
    result: Result = {}
    for e, row in zip(episodes, rows, strict=True):
        for call, x in zip(e["calls"], row, strict=False):  # without steps: a number, but no call
            result[call["id"]] = (x - middle) / sqrt(variance)
    return result


def reinforce_pp_baseline(groups: list[Group], _: Options) -> Result:
    compared: list[tuple[Episode, float]] = []
    for group in groups:
        episodes = taking_part(group)
        values = rewards(episodes)
        if len(episodes) > 1 and not all_equal(values):
            compared += [(e, x - mean(values)) for e, x in zip(episodes, values, strict=True)]
    if not compared:
        return {}
    scale = sqrt(fsum(d**2 for _, d in compared) / (len(compared) - 1))
    return for_every_step([e for e, _ in compared], [d / scale for _, d in compared])


def running_baseline(groups: list[Group], options: Options, history: list[Episode]) -> Result:
    if options["key"] not in ("policy", "task"):
        raise ValueError(f"no such key in this input: {options['key']}")
    own = [{**e, "task": g["task"]} for g in groups for e in taking_part(g)]
    log = sorted([*history, *(e for e in own if e["calls"])], key=end_and_id)
    result: Result = {}
    for e in own:
        same_key = [p for p in log if options["key"] == "policy" or p["task"] == e["task"]]
        before = [p["reward"] for p in same_key if end_and_id(p) < end_and_id(e)]
        n = len(before)
        if n == 0 or n < options["min_history"]:
            continue
        weights = [options["decay"] ** (n - i) for i in range(1, n + 1)]
        baseline = fsum(w * r for w, r in zip(weights, before, strict=True)) / fsum(weights)
        for call in e["calls"]:
            result[call["id"]] = e["reward"] - baseline
    return result


def end_and_id(episode: Episode) -> tuple[int, str]:
    return episode["ended_at_ms"], str(episode["id"])


# Rules for single steps


def step_rewards(e: Episode, options: Options) -> list[float]:
    """r_{e,k}: what was said about the call, or 0; plus R_e on the last step."""
    said = [float(call["reward"] or 0.0) if options["call_rewards"] else 0.0 for call in e["calls"]]
    if said:
        said[-1] += e["reward"]
    return said


def discounted(r: list[float], gamma: float) -> list[float]:
    """G_{e,k} = sum over j >= k of gamma^(j-k) r_{e,j}."""
    return [fsum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))]


def episode_part(episodes: list[Episode], options: Options) -> tuple[list[float], bool]:
    """A^E of each episode, and whether all T of the group are equal."""
    totals = [fsum(step_rewards(e, options)) if e["calls"] else float(e["reward"]) for e in episodes]
    if all_equal(totals):
        return [0.0] * len(episodes), True
    return normalised(totals, options), False


def compared_within(
    episodes: list[Episode], key_of: Callable[[Episode, int], Hashable], options: Options
) -> dict[str, float]:
    """Each call's return against those of the steps under the same key, each step counted once.

    Calls under a key that only one episode has are left out; where all returns are equal there is 0.
    """
    members: dict[Hashable, list[tuple[int, str, float]]] = defaultdict(list)
    for number, e in enumerate(episodes):
        returns = discounted(step_rewards(e, options), options["gamma"])
        for k, call in enumerate(e["calls"]):
            members[key_of(e, k)].append((number, call["id"], returns[k]))
    result: dict[str, float] = {}
    for steps in members.values():
        if len({number for number, _, _ in steps}) < 2:
            continue
        values = [x for _, _, x in steps]
        compared = [0.0] * len(values) if all_equal(values) else normalised(values, options)
        result.update({call: a for (_, call, _), a in zip(steps, compared, strict=True)})
    return result


def state(e: Episode, k: int) -> Hashable:
    """The call's agent and its state; "start" before step 0."""
    return (e["calls"][k]["agent"], e["calls"][k]["state"]) if k >= 0 else "start"


def gigpo(episodes: list[Episode], options: Options) -> Result:
    of_episode, no_variance = episode_part(episodes, options)
    of_state = compared_within(episodes, state, options)
    result: Result = {}
    for e, a_episode in zip(episodes, of_episode, strict=True):
        for call in e["calls"]:
            a = a_episode + options["omega"] * of_state.get(call["id"], 0.0)
            result[call["id"]] = None if no_variance and a == 0 else a
    return result


def hgpo(episodes: list[Episode], options: Options) -> Result:
    def context(d: int) -> Callable[[Episode, int], Hashable]:
        return lambda e, k: tuple(state(e, k - back) for back in range(d + 1))

    of_episode, no_variance = episode_part(episodes, options)
    depths = range(options["depth"] + 1)
    kept = [compared_within(episodes, context(d), options) for d in depths]
    weights = [(d + 1) ** options["alpha"] for d in depths]
    result: Result = {}
    for e, a_episode in zip(episodes, of_episode, strict=True):
        for call in e["calls"]:
            ident = call["id"]
            pairs = [(weights[d], kept[d][ident]) for d in depths if ident in kept[d]]
            a = options["episode_weight"] * a_episode
            if pairs:
                a += fsum(w * x for w, x in pairs) / fsum(w for w, _ in pairs)
            nothing_shared = not pairs and options["episode_weight"] == 0
            result[ident] = None if nothing_shared or (no_variance and a == 0) else a
    return result


def gae(e: Episode, options: Options) -> dict[str, float]:
    """B of the calls that have a value."""
    r = step_rewards(e, options)
    gamma, lam = options["gamma"], options["lam"]
    v_next, b_next = 0.0, 0.0
    result: dict[str, float] = {}
    for k in reversed(range(len(r))):
        call = e["calls"][k]
        if call["value"] is None:  # V(s_k) := r_k + gamma V(s_{k+1}), so delta is 0
            v, delta = r[k] + gamma * v_next, 0.0
        else:
            v = call["value"]
            delta = r[k] + gamma * v_next - v
        b = delta + gamma * lam * b_next
        if call["value"] is not None:
            result[call["id"]] = b
        v_next, b_next = v, b
    return result


def step_gae(groups: list[Group], options: Options) -> Result:
    rows = [row for row in (gae(e, options) for e in all_taking_part(groups)) if row]
    b = {call: x for row in rows for call, x in row.items()}
    numbers = list(b.values())
    if options["whiten"] == "none":
        return {**b}
    counted = rows if options["whiten"] == "episodes" else numbers
    if len(counted) < 2 or all_equal(numbers):
        return {}
    if options["whiten"] == "episodes":
        middle, variance = mean_and_variance_by_episode([list(row.values()) for row in rows], len(rows) - 1)
        scale = sqrt(variance)
    else:
        middle, scale = mean(numbers), deviation(numbers, "sample")
    return {call: (x - middle) / scale for call, x in b.items()}


def intermediate(episodes: list[Episode], options: Options) -> Result:
    returns = [discounted(step_rewards(e, options), options["gamma"]) for e in episodes]
    if options["compare"] == "group":
        return intermediate_by_group(episodes, returns, options)
    result: Result = {}
    for k in range(max(len(row) for row in returns)):
        there = [i for i, row in enumerate(returns) if k < len(row)]
        values = [returns[i][k] for i in there]
        if len(values) > 1 and not all_equal(values):
            for i, a in zip(there, normalised(values, options), strict=True):
                result[episodes[i]["calls"][k]["id"]] = a
    return result


def intermediate_by_group(episodes: list[Episode], returns: list[list[float]], options: Options) -> Result:
    rows = [row or [float(e["reward"])] for e, row in zip(episodes, returns, strict=True)]
    if all_equal([x for row in rows for x in row]):
        return {}
    divisor = len(rows) if options["std"] == "population" else len(rows) - 1
    middle, variance = mean_and_variance_by_episode(rows, divisor)
    scale = 1.0 if options["std"] == "none" else sqrt(variance) + options["eps"]
    result: Result = {}
    for e, row in zip(episodes, returns, strict=True):
        for call, x in zip(e["calls"], row, strict=True):
            result[call["id"]] = (x - middle) / scale
    return result


def dr_mas(episodes: list[Episode], options: Options) -> Result:
    result: Result = {}
    for agent in sorted({call["agent"] for e in episodes for call in e["calls"]}):
        acting = [e for e in episodes if any(call["agent"] == agent for call in e["calls"])]
        compared, values = rewards_of_agent(agent, acting, options["agent_rewards"])
        if len(values) < 2 or all_equal(values):
            continue
        for e, a in zip(compared, normalised(values, options), strict=True):
            result.update({call["id"]: a for call in e["calls"] if call["agent"] == agent})
    return result


def rewards_of_agent(agent: str, acting: list[Episode], how: str) -> tuple[list[Episode], list[float]]:
    """The episodes compared for this agent, and R_{e,a} of each.

    There is one source, so an episode's set of sources is that one or none; the more frequent counts, and of
    equally frequent ones the larger. Where those left have no reward about the agent, R_e stands for it.
    """
    told = [e for e in acting if e["agent_rewards"].get(agent) is not None]
    untold = [e for e in acting if e["agent_rewards"].get(agent) is None]
    if how == "ignore":
        return acting, rewards(acting)
    if len(untold) > len(told):
        return untold, rewards(untold)
    added = 1.0 if how == "add" else 0.0
    return told, [e["agent_rewards"][agent] + added * e["reward"] for e in told]


def sr_ppo(groups: list[Group], options: Options) -> Result:
    result: Result = {}
    for e in all_taking_part(groups):
        p_next = float(e["reward"])
        for call in reversed(e["calls"]):
            if call["value"] is None:  # its change falls to the step before it
                continue
            p = 1.0 - (1.0 - call["value"]) ** options["n"]
            result[call["id"]] = p_next - p
            p_next = p
    return result


BY_GROUP: dict[str, Callable[[list[Episode], Options], Result]] = {
    **{name: whole_episode(name) for name in ("lightning", "grpo", "dr_grpo", "rloo", "maxrl")},
    **{"turn_discount": turn_discount, "gigpo": gigpo, "hgpo": hgpo},
    **{"intermediate": intermediate, "dr_mas": dr_mas},
}
BY_STEP: dict[str, Callable[[list[Group], Options], Result]] = {
    **{"reinforce_pp": reinforce_pp, "reinforce_pp_baseline": reinforce_pp_baseline},
    **{"step_gae": step_gae, "sr_ppo": sr_ppo},
}
