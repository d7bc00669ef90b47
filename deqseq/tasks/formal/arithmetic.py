"""Modular arithmetic, with and without brackets, and its equations."""

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.check import check_flag, check_integer, check_type
from deqseq.tasks.formal.language import BLANK, FormalTask, answered, uniform
from deqseq.tasks.task import WordBatch

OPERATORS = "+-*"  # their ids follow those of the numbers


def modular_arithmetic(modulus: int = 5, *, brackets: bool = False, operators: str = OPERATORS) -> FormalTask:
    """The value of an expression modulo a number; regular, or with brackets deterministic context-free.

    Without brackets an expression is like "3 - 2 * 4", of odd length; for an even length one symbol less is drawn. With
    brackets it is (left operator right), where left and right share the rest of the length at random; expressions of
    up to four symbols are d, -d, (d) and (-d).

    Args:
        modulus: numbers are 0 to ``modulus`` - 1, at least 2.
        brackets: whether there are brackets.
        operators: some of "+-*", uniform. Delétang et al. have "+-" where there are brackets, by default.

    Returns:
        The task. Its answer is one number.

    Raises:
        TypeError: ``operators`` is no string, or ``brackets`` no bool.
        ValueError: ``modulus`` is below 2, or ``operators`` are none, repeat or have others.

    Example:
        >>> task = modular_arithmetic(brackets=True)
        >>> batch = task.fixed(1, 12, seed=3)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0, -1:])
        ('( ( 2 ) * ( 4 - - 3 ) ) _', '4')
    """
    check_integer("modulus", modulus, 2)
    check_flag("brackets", brackets)
    check_type("operators", operators, str)
    if not operators or len(set(operators)) < len(operators) or not set(operators) <= set(OPERATORS):
        raise ValueError(f"operators must be some of {OPERATORS!r}, each once, got {operators!r}")
    numbers, known = tuple(map(str, range(modulus))), torch.tensor([OPERATORS.index(one) for one in operators])

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        drawn = _bracketed if brackets else _plain
        strings, values = drawn(batch, length, modulus, known, generator)
        return answered(strings, values[:, None], blank=len(symbols) - 1)

    symbols = (*numbers, *OPERATORS, *("()" if brackets else ""), BLANK)
    others = "" if operators == OPERATORS else f"_{operators}"
    return FormalTask(f"modular_arithmetic{'_brackets' * brackets}{others}", symbols, numbers, make)


def solve_equation(modulus: int = 5) -> FormalTask:
    """Deterministic context-free: the x that solves an equation, as in (3 - (x + 1)) = 4.

    The left side is an expression with brackets, "+" and "-", one of whose numbers is x; so the solution is unique.

    Args:
        modulus: numbers are 0 to ``modulus`` - 1, at least 2.

    Returns:
        The task. Its answer is one number.

    Raises:
        ValueError: ``modulus`` is below 2.

    Example:
        >>> task = solve_equation()
        >>> batch = task.fixed(1, 12, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0, -1:])
        ('( 3 + ( x - - 4 ) ) = 3 _', '1')
    """
    check_integer("modulus", modulus, 2)
    numbers = tuple(map(str, range(modulus)))
    symbols = (*numbers, *OPERATORS, "(", ")", "x", "=", BLANK)
    unknown, equals, blank = range(modulus + 5, modulus + 8)

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        left, values = _bracketed(batch, length - 2, modulus, torch.tensor([0, 1]), generator)
        weight = torch.where(left < modulus, torch.rand(left.shape, generator=generator), -1)
        place = weight.argmax(1, keepdim=True)  # uniform over the numbers
        solution = left.gather(1, place)
        right = torch.stack([torch.full_like(values, equals), values], dim=1)
        return answered(torch.cat([left.scatter(1, place, unknown), right], dim=1), solution, blank)

    return FormalTask("solve_equation", symbols, numbers, make, shortest=3)


def _plain(
    batch: int, length: int, modulus: int, operators: Tensor, generator: torch.Generator
) -> tuple[Int64[Tensor, "batch odd"], Int64[Tensor, " batch"]]:
    """Expressions without brackets and their values."""
    count = (length - 1) // 2
    numbers = torch.randint(modulus, (batch, count + 1), generator=generator)
    chosen = operators[torch.randint(len(operators), (batch, count), generator=generator)]
    strings = torch.empty(batch, 2 * count + 1, dtype=torch.int64)
    strings[:, ::2], strings[:, 1::2] = numbers, modulus + chosen
    total, term = torch.zeros(batch, dtype=torch.int64), numbers[:, 0]
    for operator, number in zip(chosen.T, numbers[:, 1:].T, strict=True):
        times = operator == 2
        total = torch.where(times, total, total + term)
        term = torch.where(times, term * number % modulus, number * (1 - 2 * operator))
    return strings, (total + term) % modulus


def _bracketed(
    batch: int, length: int, modulus: int, operators: Tensor, generator: torch.Generator
) -> tuple[Int64[Tensor, "batch length"], Int64[Tensor, " batch"]]:
    """Expressions with brackets and their values, the parts of one depth at a time."""
    start, size = torch.arange(batch) * length, torch.full((batch,), length)
    depths, cuts = [], []
    while len(start):
        inner = size > 4
        depths.append((start, size, inner))
        start, size = start[inner], size[inner]
        left = 1 + uniform(size - 4, generator)
        cuts.append(start + 1 + left)
        start, size = torch.cat([start + 1, cuts[-1] + 1]), torch.cat([left, size - left - 3])

    start, size, inner = (torch.cat(parts) for parts in zip(*depths, strict=True))
    number = torch.randint(modulus, size.shape, generator=generator)
    operator = operators[torch.randint(len(operators), size.shape, generator=generator)]
    signed, place = ~inner & (size % 2 == 0), start + size // 2
    strings = torch.empty(batch * length, dtype=torch.int64)
    strings[start[size > 2]] = modulus + 3
    strings[(start + size)[size > 2] - 1] = modulus + 4
    strings[place[~inner]] = number[~inner]
    strings[place[signed] - 1] = modulus + 1
    strings[torch.cat(cuts)] = modulus + operator[inner]

    counts = [len(part) for part, _, _ in depths]
    levels = zip(
        torch.where(signed, -number, number).split(counts), operator.split(counts), inner.split(counts), strict=True
    )
    below = torch.empty(0, dtype=torch.int64)
    for value, chosen, inside in reversed(list(levels)):
        chosen, a, b = chosen[inside], below[: len(below) // 2], below[len(below) // 2 :]
        results = torch.where(chosen == 0, a + b, torch.where(chosen == 1, a - b, a * b))
        below = value.masked_scatter(inside, results) % modulus
    return strings.view(batch, length), below
