"""Task 19: rooms lie next to each other; how do you go from one to another?"""

import random
from collections.abc import Sequence
from itertools import pairwise

from deqseq.tasks.babi.story import Fact, Question, Story

ROOMS = (
    "attic",
    "balcony",
    "bathroom",
    "bedroom",
    "cellar",
    "garage",
    "garden",
    "hallway",
    "kitchen",
    "library",
    "lobby",
    "lounge",
    "nursery",
    "office",
    "pantry",
    "study",
)
STEPS = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
DIRECTIONS = {"n": "north", "e": "east", "s": "south", "w": "west"}

Place = tuple[int, int]


def path_story(rng: random.Random, scale: int) -> Story:
    """Task 19: where rooms lie on a grid, in any order; then the way of two steps between two of them.

    The rooms and the facts between them form a tree, so that there is one way only.

    Args:
        rng: source of all randomness.
        scale: there are ``5 * scale`` facts, between rooms drawn from sixteen; 1 to 3.

    Returns:
        The story; its question is supported by the two facts of the way.
    """
    names = rng.sample(ROOMS, 5 * scale + 1)
    rooms, doors = _layout(rng, names)
    facts = [_fact(rng, rooms, door) for door in doors]
    order = rng.sample(range(len(doors)), len(doors))
    place = {frozenset(doors[i]): number for number, i in enumerate(order, start=1)}
    way = rng.choice(_ways_of_two_steps(doors))
    answer = ",".join(_direction(rooms[a], rooms[b]) for a, b in pairwise(way))
    support = sorted(place[frozenset(door)] for door in pairwise(way))
    question = Question(f"How do you go from the {way[0]} to the {way[2]}?", answer, tuple(support))
    return Story(19, (*(facts[i] for i in order), question))


def _layout(rng: random.Random, names: Sequence[str]) -> tuple[dict[str, Place], list[tuple[str, str]]]:
    """Places of the rooms on a grid, and a tree of neighbours: each room but the first hangs on an earlier one."""
    rooms: dict[str, Place] = {names[0]: (0, 0)}
    doors = []
    for name in names[1:]:
        free = [
            (other, (x + dx, y + dy))
            for other, (x, y) in rooms.items()
            for dx, dy in STEPS.values()
            if (x + dx, y + dy) not in rooms.values()
        ]
        other, place = rng.choice(free)
        rooms[name] = place
        doors.append((other, name))
    return rooms, doors


def _fact(rng: random.Random, rooms: dict[str, Place], door: tuple[str, str]) -> Fact:
    """Which of two neighbours lies where, told from either side."""
    a, b = door if rng.random() < 0.5 else door[::-1]
    return Fact(f"The {b} is {DIRECTIONS[_direction(rooms[a], rooms[b])]} of the {a}.")


def _ways_of_two_steps(doors: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """All ways over one room between; a tree of at least two doors has some."""
    near: dict[str, list[str]] = {}
    for a, b in doors:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    return [(a, middle, b) for middle, ends in near.items() for a in ends for b in ends if a != b]


def _direction(start: Place, end: Place) -> str:
    step = (end[0] - start[0], end[1] - start[1])
    return next(name for name, vector in STEPS.items() if vector == step)
