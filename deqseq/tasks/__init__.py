"""Tasks with exact answers: data made from a seed, no files needed."""

from deqseq.tasks.groups import FiniteMonoid, direct_product, generators, parse_group
from deqseq.tasks.stories import Answers, Balls, Programs, Story
from deqseq.tasks.task import Task, WordBatch, WordProblem, prefix_products

__all__ = [
    "Answers",
    "Balls",
    "FiniteMonoid",
    "Programs",
    "Story",
    "Task",
    "WordBatch",
    "WordProblem",
    "direct_product",
    "generators",
    "parse_group",
    "prefix_products",
]
