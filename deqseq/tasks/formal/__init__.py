"""Formal languages: strings whose answers a finite automaton, a stack or a tape can compute.

A string of a given length comes first, then one blank for each symbol of the answer, which is scored at the blanks. The
tasks are those of Delétang et al. (ICLR 2023, arXiv 2207.02098), and two that are scored inside the string: Dyck
languages and associative recall.
"""

from collections.abc import Mapping

from deqseq.tasks.formal.arithmetic import modular_arithmetic, solve_equation
from deqseq.tasks.formal.binary import binary_addition, binary_multiplication, compute_sqrt
from deqseq.tasks.formal.language import FormalTask
from deqseq.tasks.formal.memory import associative_recall, dyck, stack_manipulation
from deqseq.tasks.formal.strings import (
    bucket_sort,
    cycle_navigation,
    duplicate_string,
    even_pairs,
    missing_duplicate,
    odds_first,
    parity_check,
    reverse_string,
)

TASKS: Mapping[str, FormalTask] = {
    task.name: task
    for task in (
        even_pairs(),
        parity_check(),
        cycle_navigation(),
        modular_arithmetic(),
        modular_arithmetic(brackets=True),
        solve_equation(),
        reverse_string(),
        stack_manipulation(),
        bucket_sort(),
        duplicate_string(),
        missing_duplicate(),
        odds_first(),
        binary_addition(),
        binary_multiplication(),
        compute_sqrt(),
        dyck(),
        associative_recall(),
    )
}
"""All tasks with their default sizes, by name, for command lines: ``TASKS["reverse_string"]``."""

__all__ = [
    "TASKS",
    "FormalTask",
    "associative_recall",
    "binary_addition",
    "binary_multiplication",
    "bucket_sort",
    "compute_sqrt",
    "cycle_navigation",
    "duplicate_string",
    "dyck",
    "even_pairs",
    "missing_duplicate",
    "modular_arithmetic",
    "odds_first",
    "parity_check",
    "reverse_string",
    "solve_equation",
    "stack_manipulation",
]
