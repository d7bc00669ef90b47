"""Tasks with exact answers: data made from a seed, no files needed."""

from deqseq.tasks.groups import (
    FiniteMonoid,
    alternating,
    aperiodic_monoid,
    cyclic,
    direct_product,
    generators,
    parse_group,
    symmetric,
)
from deqseq.tasks.word_problem import WordBatch, WordProblem, a5_monoid_word_problem, prefix_products

__all__ = [
    "FiniteMonoid",
    "WordBatch",
    "WordProblem",
    "a5_monoid_word_problem",
    "alternating",
    "aperiodic_monoid",
    "cyclic",
    "direct_product",
    "generators",
    "parse_group",
    "prefix_products",
    "symmetric",
]
