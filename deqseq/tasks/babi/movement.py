"""Tasks 1 to 3: people move and carry things; where is somebody, where is a thing, where was it before?"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from deqseq.tasks.babi.story import Fact, Question, Story

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
TAKES = ("got", "grabbed", "picked up", "took")
DROPS = ("dropped", "discarded", "left", "put down")
MOVE_SHARE = 0.6
"""How often a person moves who could as well take or drop something."""


@dataclass(frozen=True)
class Stay:
    """A thing in a room.

    Attributes:
        room: where it is.
        facts: ids of the facts that put it there: it was taken, its carrier came from the room before, and went to
            this one. Empty where it was first seen.
    """

    room: str
    facts: tuple[int, ...] = ()


@dataclass
class World:
    """Who is where, and what is where, while a story is told.

    Attributes:
        lines: the story so far.
        moves: of each person who has been seen, rooms and ids of the facts that say so, the last one last.
        stays: of each thing that has been seen, where it has been, the last one last.
        held: of each thing that is carried, its carrier and the id of the fact that says so.
        left: of each thing that has been dropped and not taken since, ids of the two facts that say where it is.
    """

    random: random.Random
    lines: list[Fact | Question] = field(default_factory=list)
    moves: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    stays: dict[str, list[Stay]] = field(default_factory=dict)
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    left: dict[str, tuple[int, int]] = field(default_factory=dict)

    def tell(self, text: str) -> int:
        """Add a fact; returns its id."""
        self.lines.append(Fact(text))
        return len(self.lines)

    def move(self, person: str) -> None:
        """The person goes to another room, with what they carry."""
        past = self.moves.setdefault(person, [])
        room = self.random.choice([room for room in ROOMS if not past or room != past[-1][0]])
        number = self.tell(f"{person} {self.random.choice(MOVES)} the {room}.")
        for thing, (carrier, taken) in self.held.items():
            if carrier == person:
                facts = tuple(sorted((taken, past[-1][1], number)))
                self.stays[thing].append(Stay(room, facts))
        past.append((room, number))

    def take(self, person: str, thing: str) -> None:
        """The person takes a thing in the room they are in."""
        number = self.tell(f"{person} {self.random.choice(TAKES)} the {thing}{self._there()}.")
        self.held[thing] = (person, number)
        self.left.pop(thing, None)
        self.stays.setdefault(thing, [Stay(self.room(person))])

    def drop(self, thing: str) -> None:
        """Whoever carries the thing leaves it in the room they are in."""
        person, _ = self.held.pop(thing)
        number = self.tell(f"{person} {self.random.choice(DROPS)} the {thing}{self._there()}.")
        self.left[thing] = (self.moves[person][-1][1], number)

    def room(self, person: str) -> str:
        """Where somebody is who has been seen."""
        return self.moves[person][-1][0]

    def happen(self) -> None:
        """Somebody moves, takes or drops something."""
        person = self.random.choice(PEOPLE)
        mine = [thing for thing, (carrier, _) in self.held.items() if carrier == person]
        near = [thing for thing in THINGS if self._within_reach(person, thing)]
        choices = mine + near
        if not choices or self.random.random() < MOVE_SHARE:
            self.move(person)
        elif (thing := self.random.choice(choices)) in mine:
            self.drop(thing)
        else:
            self.take(person, thing)

    def _within_reach(self, person: str, thing: str) -> bool:
        if person not in self.moves or thing in self.held:
            return False
        return thing not in self.stays or self.stays[thing][-1].room == self.room(person)

    def _there(self) -> str:
        return self.random.choice((" there", ""))


def one_fact_story(rng: random.Random, scale: int) -> Story:
    """Task 1: people move; where is one of them?

    Args:
        rng: source of all randomness.
        scale: there are ``2 * scale`` facts before each of the five questions.

    Returns:
        The story; each question is supported by the person's last move.
    """
    world = World(rng)
    for _ in range(5):
        for _ in range(2 * scale):
            world.move(rng.choice(PEOPLE))
        person = rng.choice(sorted(world.moves))
        room, fact = world.moves[person][-1]
        world.lines.append(Question(f"Where is {person}?", room, (fact,)))
    return Story(1, tuple(world.lines))


def two_fact_story(rng: random.Random, scale: int) -> Story:
    """Task 2: people move and carry things; where is a thing?

    Args:
        rng: source of all randomness.
        scale: there are at least ``4 * scale`` facts before each of the three questions.

    Returns:
        The story; each question is supported by two facts: somebody took the thing and has last gone to the room, or
        had gone there and dropped it.
    """
    return Story(2, _told(World(rng), 4 * scale, _where_is))


def three_fact_story(rng: random.Random, scale: int) -> Story:
    """Task 3: people move and carry things; where was a thing before it came to a room?

    If the thing came to that room more than once, the last time counts.

    Args:
        rng: source of all randomness.
        scale: there are at least ``5 * scale`` facts before each of the three questions.

    Returns:
        The story; each question is supported by three facts: somebody took the thing, and went to the one room, then
        to the other.
    """
    return Story(3, _told(World(rng), 5 * scale, _where_was))


def _told(world: World, facts: int, questions: Callable[[World], list[Question]]) -> tuple[Fact | Question, ...]:
    """Three times: so many facts, more until there is something to ask, and a question."""
    for _ in range(3):
        for _ in range(facts):
            world.happen()
        while not (possible := questions(world)):
            world.happen()
        world.lines.append(world.random.choice(possible))
    return tuple(world.lines)


def _where_is(world: World) -> list[Question]:
    """A question for each thing that has been seen."""
    questions = []
    for thing, stays in world.stays.items():
        support = world.left.get(thing)
        if support is None:
            carrier, taken = world.held[thing]
            support = tuple(sorted((taken, world.moves[carrier][-1][1])))
        questions.append(Question(f"Where is the {thing}?", stays[-1].room, support))
    return questions


def _where_was(world: World) -> list[Question]:
    """A question for each room that a thing was carried to, about the last time."""
    questions = []
    for thing, stays in world.stays.items():
        last = {after.room: (before, after) for before, after in pairwise(stays)}
        for room, (before, after) in last.items():
            questions.append(Question(f"Where was the {thing} before the {room}?", before.room, after.facts))
    return questions
