"""Ten rooms: a toy world in which the outcome hangs on two of ten calls.

An agent walks through ten rooms and pulls one of four levers in each. In one room the right lever gives it a
key, in a later one the right lever opens the chest, but only with the key; which lever is right is written on
the wall as a sigil whose meaning has to be learnt. In the other eight rooms the levers do nothing. The reward
comes at the end: 1 with the treasure, 0 without. A policy that pulls levers at random succeeds once in 16
episodes.

What the agent sees is a state in the sense of step-level credit: room, sign on the wall, and what it carries.
Siblings of one group walk through the same rooms. Fixed before the first comparison of rules; knows nothing
of models or of credit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

NUM_ROOMS = 10
NUM_LEVERS = 4
KEY_ROOMS = (1, 2, 3, 4)  # one of these gives the key
CHEST_ROOMS = (5, 6, 7, 8)  # one of these holds the chest

# Tokens of the tiny vocabulary.
LEVER = range(4)
START = 4
ROOM = range(5, 15)
KEY_SIGIL = range(15, 19)
CHEST_SIGIL = range(19, 23)
PLAIN_SIGN = range(23, 27)
CARRIES = {"nothing": 27, "key": 28, "treasure": 29}
VOCABULARY = 32

_RIGHT_FOR_KEY = (2, 0, 3, 1)  # by sigil
_RIGHT_FOR_CHEST = (1, 3, 0, 2)

Carried = Literal["nothing", "key", "treasure"]


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    key_room: int
    chest_room: int
    signs: tuple[int, ...]  # token on the wall of each room

    @classmethod
    def random(cls, name: str, random_: random.Random) -> Task:
        key_room, chest_room = random_.choice(KEY_ROOMS), random_.choice(CHEST_ROOMS)
        signs = [random_.choice(PLAIN_SIGN) for _ in range(NUM_ROOMS)]
        signs[key_room] = random_.choice(KEY_SIGIL)
        signs[chest_room] = random_.choice(CHEST_SIGIL)
        return cls(name, key_room, chest_room, tuple(signs))

    def right_lever(self, room: int) -> int | None:
        """None: no lever of this room does anything."""
        if room == self.key_room:
            return _RIGHT_FOR_KEY[KEY_SIGIL.index(self.signs[room])]
        if room == self.chest_room:
            return _RIGHT_FOR_CHEST[CHEST_SIGIL.index(self.signs[room])]
        return None


@dataclass(slots=True)
class Walk:
    """One episode under way."""

    task: Task
    room: int = 0
    carries: Carried = "nothing"

    def prompt(self) -> list[int]:
        """What the agent sees, as tokens."""
        return [START, ROOM[self.room], self.task.signs[self.room], CARRIES[self.carries]]

    def state_key(self) -> str:
        return f"{self.room} {self.task.signs[self.room]} {self.carries}"

    def pull(self, token: int) -> bool:
        """Act in this room and go on to the next; whether something was achieved."""
        before = self.carries
        if token == self.task.right_lever(self.room):
            if self.room == self.task.key_room:
                self.carries = "key"
            elif self.carries == "key":
                self.carries = "treasure"
        self.room += 1
        return self.carries != before

    @property
    def is_over(self) -> bool:
        return self.room == NUM_ROOMS

    @property
    def reward(self) -> float:
        return 1.0 if self.carries == "treasure" else 0.0
