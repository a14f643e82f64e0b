"""One-operation sums for the calculator agent, and the reward that judges an answer.

The numbers follow the one-operation sums in GSM8K's solutions (Cobbe et al. 2021, MIT): operations in about
the same proportions, operands drawn between the same quantiles. Everything hangs on the seed: the same call
gives the same tasks, and the train and held-out sets share no sum (a + b and b + a are the same sum).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

# Of 1,200 sums: how often each operation stands there, and the 0, 10, 25, 50, 75, 90 and 98 % quantiles.
_PROPORTIONS = {"*": 409, "+": 375, "-": 293, "/": 123}
_LEFT = {"+": (1, 6, 14, 30, 50, 72, 99), "-": (3, 15, 24, 46, 65, 88, 123), "*": (1, 2, 5, 18, 60, 180, 625)}
_RIGHT = {"+": (0, 3, 7, 16, 35, 50, 81), "-": (1, 3, 6, 13, 29, 45, 68), "*": (0, 2, 4, 11, 32, 90, 459)}
_DIVISOR = (1, 2, 2, 4, 7, 12, 20)
_QUOTIENT = (1, 3, 6, 24, 80, 142, 448)
_LEVELS = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 1.0)

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    question: str
    answer: int


def _draw(random_source: random.Random, quantiles: tuple[int, ...]) -> int:
    at = random_source.random()
    piece = next(i for i in range(len(_LEVELS) - 1) if at <= _LEVELS[i + 1])
    share = (at - _LEVELS[piece]) / (_LEVELS[piece + 1] - _LEVELS[piece])
    return round(quantiles[piece] + share * (quantiles[piece + 1] - quantiles[piece]))


def _sum(random_source: random.Random) -> tuple[int, str, int, int]:
    sign = random_source.choices(list(_PROPORTIONS), weights=list(_PROPORTIONS.values()))[0]
    if sign == "/":  # whole quotients, as in the source
        divisor, quotient = _draw(random_source, _DIVISOR), _draw(random_source, _QUOTIENT)
        return divisor * quotient, sign, divisor, quotient
    left, right = _draw(random_source, _LEFT[sign]), _draw(random_source, _RIGHT[sign])
    if sign == "-":
        left, right = max(left, right), min(left, right)
    return left, sign, right, {"+": left + right, "-": left - right, "*": left * right}[sign]


def make_tasks(num_train: int = 800, num_held_out: int = 400, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Disjoint train and held-out sums."""
    random_source = random.Random(seed)
    seen: set[tuple[object, ...]] = set()
    tasks: list[Task] = []
    while len(tasks) < num_train + num_held_out:
        left, sign, right, answer = _sum(random_source)
        key = (sign, *(sorted((left, right)) if sign in "+*" else (left, right)))
        if key not in seen:
            seen.add(key)
            tasks.append(Task(f"sum-{len(tasks):04d}", f"What is {left} {sign} {right}?", answer))
    return tasks[:num_train], tasks[num_train:]


def reward(task: Task, reply: str) -> float:
    """1.0 if the last number in the reply is the answer, else 0.0."""
    numbers = _NUMBER.findall(reply)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == task.answer)
