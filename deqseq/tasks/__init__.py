"""Tasks with exact answers: data made from a seed, no files needed."""

from deqseq.tasks.groups import alternating, aperiodic_monoid, cyclic, dihedral, parse_group, quaternion, symmetric
from deqseq.tasks.monoid import FiniteMonoid, direct_product, generators
from deqseq.tasks.task import Task, WordBatch
from deqseq.tasks.word_problem import WordProblem, prefix_products

__all__ = [
    "FiniteMonoid",
    "Task",
    "WordBatch",
    "WordProblem",
    "alternating",
    "aperiodic_monoid",
    "cyclic",
    "dihedral",
    "direct_product",
    "generators",
    "parse_group",
    "prefix_products",
    "quaternion",
    "symmetric",
]
