"""Task 15: kinds of animals are afraid of kinds of animals; what is one animal afraid of?"""

import random

from deqseq.tasks.babi.story import Fact, Question, Story

NAMES = (
    "Bernhard",
    "Brian",
    "Emily",
    "Gertrude",
    "Greg",
    "Jeff",
    "Jessica",
    "Julius",
    "Lily",
    "Sumit",
    "Winona",
    "Yann",
)
KINDS = {
    "bear": "bears",
    "cat": "cats",
    "dog": "dogs",
    "fox": "foxes",
    "frog": "frogs",
    "lion": "lions",
    "mouse": "mice",
    "rhino": "rhinos",
    "sheep": "sheep",
    "snake": "snakes",
    "swan": "swans",
    "wolf": "wolves",
}
"""Kinds of animals, singular and plural."""


def deduction_story(rng: random.Random, scale: int) -> Story:
    """Task 15: who is what, and what is afraid of what, in any order; then four questions.

    Args:
        rng: source of all randomness.
        scale: there are ``4 * scale`` kinds and as many names, drawn from twelve each; 1 to 3.

    Returns:
        The story; each question is supported by two facts: what the animal is, and what its kind is afraid of.
    """
    kinds, names = rng.sample(sorted(KINDS), 4 * scale), rng.sample(NAMES, 4 * scale)
    feared = {kind: rng.choice([other for other in kinds if other != kind]) for kind in kinds}
    kind_of = {name: rng.choice(kinds) for name in names}
    rules = {kind: f"{KINDS[kind].capitalize()} are afraid of {KINDS[feared[kind]]}." for kind in kinds}
    facts = [*rules.values(), *(f"{name} is a {kind}." for name, kind in kind_of.items())]
    rng.shuffle(facts)
    place = {fact: number for number, fact in enumerate(facts, start=1)}
    questions = []
    for name in rng.sample(names, 4):
        kind = kind_of[name]
        support = sorted((place[f"{name} is a {kind}."], place[rules[kind]]))
        questions.append(Question(f"What is {name.lower()} afraid of?", feared[kind], tuple(support)))
    return Story(15, (*(Fact(fact) for fact in facts), *questions))
