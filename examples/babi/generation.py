"""Stories generated from a seed, in the form of the official files of tasks 1, 2, 3, 15 and 19.

The form and the kinds of words are those of the official files. The words, their frequencies and the order of events
are our own.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from babi.stories import Line, Story
from deqseq.check import check_choice, check_integer

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
TAKES = ("got", "grabbed", "picked up", "took")
DROPS = ("dropped", "discarded", "left", "put down")
MOVE_SHARE = 0.6  # how often a person moves who could also take or drop something
NAMES = "Bernhard Brian Emily Gertrude Greg Jeff Jessica Julius Lily Sumit Winona Yann"
KINDS = {"bear": "bears", "cat": "cats", "dog": "dogs", "fox": "foxes", "frog": "frogs", "lion": "lions"}
KINDS |= {"mouse": "mice", "rhino": "rhinos", "sheep": "sheep", "snake": "snakes", "swan": "swans", "wolf": "wolves"}
PLACES = (
    "attic balcony bathroom bedroom cellar garage garden hallway "
    "kitchen library lobby lounge nursery office pantry study"
)
STEPS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
SCALES = (1, 2, 3)
"""Multiples of the number of facts before a question."""


def generate_stories(task: int, count: int, *, seed: int, scale: int = 1) -> list[Story]:
    """Generate stories of one task.

    Stories of every scale use the same words, so a model trained at one scale can be tested at another.

    Args:
        task: 1, 2, 3 (one, two, three supporting facts), 15 (basic deduction) or 19 (path finding).
        count: number of stories, at least 1. A larger count from the same seed begins with the same stories.
        seed: any integer. Seeds, tasks and scales give independent stories.
        scale: 1 to 3. Multiplies the facts before each question: 2, at least 4, at least 5, 8 and 5 in the five tasks.

    Returns:
        The stories; the same arguments give the same stories.

    Raises:
        ValueError: the task has no generator, or a number is out of its range.
    """
    check_choice("task", task, GENERATORS)
    check_integer("count", count, 1)
    check_choice("scale", scale, SCALES)
    rngs = (random.Random(f"babi {task} {scale} {seed} {index}") for index in range(count))
    return [Story(task, tuple(GENERATORS[task](rng, scale))) for rng in rngs]


@dataclass
class World:
    """The state of a story about people who move and carry things.

    Attributes:
        lines: the story so far.
        moves: per person, the rooms entered and the line that says so, in order.
        visits: per thing, the rooms it has been in and the lines that put it there: taken, the carrier's previous
            move, the carrier's move. No lines where it was first seen.
        carried: per thing that is carried, the carrier and the line that says so.
        dropped: per thing that lies in a room, the two lines that say where.
    """

    rng: random.Random
    lines: list[Line] = field(default_factory=list)
    moves: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    visits: dict[str, list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    carried: dict[str, tuple[str, int]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, int]] = field(default_factory=dict)

    def tell(self, text: str) -> int:
        """Append a fact and return its number."""
        self.lines.append(Line(text))
        return len(self.lines)

    def move(self, person: str) -> None:
        """Move a person, and what they carry, to another room."""
        past = self.moves.setdefault(person, [])
        room = self.rng.choice([room for room in ROOMS if not past or room != past[-1][0]])
        number = self.tell(f"{person} {self.rng.choice(MOVES)} the {room}.")
        for thing, (carrier, taken) in self.carried.items():
            if carrier == person:
                self.visits[thing].append((room, tuple(sorted((taken, past[-1][1], number)))))
        past.append((room, number))

    def take(self, person: str, thing: str) -> None:
        """Have a person take a thing from the room they are in."""
        number = self.tell(f"{person} {self.rng.choice(TAKES)} the {thing}{self.rng.choice((' there', ''))}.")
        self.carried[thing] = (person, number)
        self.dropped.pop(thing, None)
        self.visits.setdefault(thing, [(self.moves[person][-1][0], ())])

    def drop(self, thing: str) -> None:
        """Have the carrier of a thing leave it in the room they are in."""
        person, _ = self.carried.pop(thing)
        number = self.tell(f"{person} {self.rng.choice(DROPS)} the {thing}{self.rng.choice((' there', ''))}.")
        self.dropped[thing] = (self.moves[person][-1][1], number)

    def happen(self) -> None:
        """Have a random person move, take or drop something."""
        person = self.rng.choice(PEOPLE)
        mine = [thing for thing, (carrier, _) in self.carried.items() if carrier == person]
        choices = mine + [thing for thing in THINGS if self.within_reach(person, thing)]
        if not choices or self.rng.random() < MOVE_SHARE:
            self.move(person)
        elif (thing := self.rng.choice(choices)) in mine:
            self.drop(thing)
        else:
            self.take(person, thing)

    def within_reach(self, person: str, thing: str) -> bool:
        """Whether a person can take a thing: nobody has seen it yet, or it lies in the person's room."""
        if person not in self.moves or thing in self.carried:
            return False
        return thing not in self.visits or self.visits[thing][-1][0] == self.moves[person][-1][0]

    def where_is(self) -> list[Line]:
        """A question for each thing that has been seen."""
        questions = []
        for thing, visits in self.visits.items():
            support = self.dropped.get(thing)
            if support is None:
                carrier, taken = self.carried[thing]
                support = tuple(sorted((taken, self.moves[carrier][-1][1])))
            questions.append(Line(f"Where is the {thing}?", visits[-1][0], support))
        return questions

    def where_was(self) -> list[Line]:
        """A question for each room that a thing was carried to, about the last time."""
        questions = []
        for thing, visits in self.visits.items():
            last = {room: (before, facts) for (before, _), (room, facts) in pairwise(visits)}
            questions += [Line(f"Where was the {thing} before the {room}?", *last[room]) for room in last]
        return questions

    def tell_story(self, facts: int, questions: Callable[[], list[Line]]) -> list[Line]:
        """Three rounds of ``facts`` events, or more until a question is possible, and a random question."""
        for _ in range(3):
            for _ in range(facts):
                self.happen()
            while not (possible := questions()):
                self.happen()
            self.lines.append(self.rng.choice(possible))
        return self.lines


def one_fact_story(rng: random.Random, scale: int) -> list[Line]:
    """Task 1: people move. Five questions, each about one person's room."""
    world = World(rng)
    for _ in range(5):
        for _ in range(2 * scale):
            world.move(rng.choice(PEOPLE))
        person = rng.choice(sorted(world.moves))
        room, number = world.moves[person][-1]
        world.lines.append(Line(f"Where is {person}?", room, (number,)))
    return world.lines


def two_fact_story(rng: random.Random, scale: int) -> list[Line]:
    """Task 2: people move and carry things. Three questions, each about one thing's room."""
    world = World(rng)
    return world.tell_story(4 * scale, world.where_is)


def three_fact_story(rng: random.Random, scale: int) -> list[Line]:
    """Task 3: people move and carry things. Three questions, each about the room before a thing's last visit."""
    world = World(rng)
    return world.tell_story(5 * scale, world.where_was)


def deduction_story(rng: random.Random, scale: int) -> list[Line]:
    """Task 15: who is of which kind, and which kind fears which. Four questions, each about one animal's fear."""
    kinds, names = rng.sample(sorted(KINDS), 4 * scale), rng.sample(NAMES.split(), 4 * scale)
    feared = {kind: rng.choice([other for other in kinds if other != kind]) for kind in kinds}
    kind_of = {name: rng.choice(kinds) for name in names}
    rules = {kind: f"{KINDS[kind].capitalize()} are afraid of {KINDS[feared[kind]]}." for kind in kinds}
    facts = [*rules.values(), *(f"{name} is a {kind}." for name, kind in kind_of.items())]
    rng.shuffle(facts)
    lines = [Line(fact) for fact in facts]
    for name in rng.sample(names, 4):
        kind = kind_of[name]
        support = sorted(facts.index(fact) + 1 for fact in (f"{name} is a {kind}.", rules[kind]))
        lines.append(Line(f"What is {name.lower()} afraid of?", feared[kind], tuple(support)))
    return lines


def path_story(rng: random.Random, scale: int) -> list[Line]:
    """Task 19: a tree of rooms on a grid. One question about the only path, two steps long, between two of them."""
    names = rng.sample(PLACES.split(), 5 * scale + 1)
    at, doors = {names[0]: (0, 0)}, []
    for name in names[1:]:  # each room lies next to an earlier one
        cells = [(other, (x + dx, y + dy)) for other, (x, y) in at.items() for dx, dy in STEPS.values()]
        other, place = rng.choice([(other, cell) for other, cell in cells if cell not in at.values()])
        at[name] = place
        doors.append((other, name))

    def direction(start: str, end: str) -> str:
        vector = (at[end][0] - at[start][0], at[end][1] - at[start][1])
        return next(name for name, step in STEPS.items() if step == vector)

    facts = []
    for door in doors:
        a, b = door if rng.random() < 0.5 else door[::-1]
        facts.append(Line(f"The {b} is {direction(a, b)} of the {a}."))
    order = rng.sample(range(len(doors)), len(doors))
    number = {frozenset(doors[door]): line for line, door in enumerate(order, start=1)}
    beside: dict[str, list[str]] = {}
    for a, b in doors:
        beside.setdefault(a, []).append(b)
        beside.setdefault(b, []).append(a)
    path = rng.choice([(a, mid, b) for mid, ends in beside.items() for a in ends for b in ends if a != b])
    answer = ",".join(direction(a, b)[0] for a, b in pairwise(path))
    support = sorted(number[frozenset(step)] for step in pairwise(path))
    question = Line(f"How do you go from the {path[0]} to the {path[2]}?", answer, tuple(support))
    return [*(facts[door] for door in order), question]


GENERATORS = {1: one_fact_story, 2: two_fact_story, 3: three_fact_story, 15: deduction_story, 19: path_story}
"""The tasks that can be generated."""
