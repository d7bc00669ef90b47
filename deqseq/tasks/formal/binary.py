"""Arithmetic of binary numbers, by Python's integers."""

import math
import operator
from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.tasks.formal.language import BLANK, END, FormalTask, answered
from deqseq.tasks.task import WordBatch


def binary_addition() -> FormalTask:
    """Context-sensitive: the sum of two binary numbers, as in 0 0 1 + 0 1 1 0 1, lowest digit first.

    The "+" is anywhere but at the ends, uniformly, and digits are uniform. The sum has no zeros above its highest 1
    (zero itself is "0") and ends with "#"; blanks after that are not scored.

    Returns:
        The task. Its answer has the length of the string at most.

    Example:
        >>> task = binary_addition()
        >>> batch = task.fixed(1, 7, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('1 1 + 0 1 1 1 _ _ _ _ _ _ _', '. . . . . . . 1 0 0 0 1 # .')
    """
    return _operation("binary_addition", "+", operator.add)


def binary_multiplication() -> FormalTask:
    """Context-sensitive: the product of two binary numbers; strings and answers are as in :func:`binary_addition`.

    Returns:
        The task. Its answer has the length of the string at most.

    Example:
        >>> binary_multiplication().symbols
        ('0', '1', '*', '#', '_')
    """
    return _operation("binary_multiplication", "*", operator.mul)


def compute_sqrt() -> FormalTask:
    """Context-sensitive: the square root of a binary number, rounded down, highest digit first.

    Returns:
        The task. Its answer has half the length of the string, rounded up, with leading zeros.

    Example:
        >>> task = compute_sqrt()
        >>> batch = task.fixed(1, 6, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('1 1 0 0 1 1 _ _ _', '. . . . . . 1 1 1')
    """

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        strings, size = torch.randint(2, (batch, length), generator=generator), (length + 1) // 2
        roots = [f"{math.isqrt(int(text, 2)):0{size}b}" for text in _texts(strings, "01")]
        return answered(strings, _ids(roots, "01", size), blank=2)

    return FormalTask("compute_sqrt", ("0", "1", BLANK), ("0", "1"), make)


def _operation(name: str, sign: str, operate: Callable[[int, int], int]) -> FormalTask:
    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        strings = torch.randint(2, (batch, length), generator=generator)
        strings = strings.scatter(1, torch.randint(1, length - 1, (batch, 1), generator=generator), 2)
        pairs = ([int(number[::-1], 2) for number in text.split(sign)] for text in _texts(strings, f"01{sign}"))
        results = [f"{operate(a, b):b}"[::-1] + END for a, b in pairs]
        return answered(strings, _ids(results, f"01{sign}{END}", length), blank=4)

    return FormalTask(name, ("0", "1", sign, END, BLANK), ("0", "1", END), make, shortest=3)


def _texts(strings: Int64[Tensor, "batch length"], symbols: str) -> list[str]:
    """Each row as text."""
    rows = torch.tensor(list(symbols.encode()), dtype=torch.uint8)[strings]
    return [row.tobytes().decode() for row in rows.numpy()]


def _ids(texts: list[str], symbols: str, size: int) -> Int64[Tensor, "batch size"]:
    """Each text as a row, filled up with -100."""
    table = torch.full((128,), -100)
    table[list(symbols.encode())] = torch.arange(len(symbols))
    letters = bytearray("".join(text.ljust(size) for text in texts).encode())
    return table[torch.frombuffer(letters, dtype=torch.uint8).long()].view(len(texts), size)
