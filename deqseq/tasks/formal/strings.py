"""Tasks whose strings are uniform over all strings, and whose answer is a function of the string."""

from collections.abc import Callable

import torch
from torch import Tensor

from deqseq.tasks.formal.language import BLANK, FormalTask, answered
from deqseq.tasks.task import WordBatch

BITS = ("0", "1")


def even_pairs() -> FormalTask:
    """Regular: whether a binary string has an odd number of the pairs 01 and 10 together; 1 if so.

    Returns:
        The task. Its answer is one symbol.

    Example:
        >>> batch = even_pairs().fixed(8, 6, seed=0)
        >>> bool((batch.targets[:, 6] == batch.inputs[:, 0] ^ batch.inputs[:, 5]).all())
        True
    """
    return _function("even_pairs", BITS, lambda bits: bits[:, :1] ^ bits[:, -1:])


def parity_check() -> FormalTask:
    """Regular: whether a binary string has an odd number of ones; 1 if so.

    Returns:
        The task. Its answer is one symbol.

    Example:
        >>> batch = parity_check().fixed(8, 6, seed=0)
        >>> bool((batch.targets[:, 6] == batch.inputs[:, :6].sum(1) % 2).all())
        True
    """
    return _function("parity_check", BITS, lambda bits: bits.sum(1, keepdim=True) % 2)


def cycle_navigation() -> FormalTask:
    """Regular: the place on a cycle of five after a walk from 0, whose steps are "=" (stay), "+" and "-".

    Returns:
        The task. Its answer is one of the five places.

    Example:
        >>> task = cycle_navigation()
        >>> task.chance, task.text(task.fixed(1, 4, seed=0).inputs[0])
        (0.2, '+ - = - _')
    """
    steps = ("=", "+", "-")
    places = tuple(map(str, range(5)))

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        walk = torch.randint(3, (batch, length), generator=generator)
        place = torch.tensor([0, 1, -1])[walk].sum(1, keepdim=True) % 5
        return answered(walk + 5, place, blank=8)

    return FormalTask("cycle_navigation", (*places, *steps, BLANK), places, make)


def reverse_string() -> FormalTask:
    """Deterministic context-free: a binary string, backwards.

    Returns:
        The task. Its answer has the length of the string.

    Example:
        >>> batch = reverse_string().fixed(8, 6, seed=0)
        >>> bool((batch.targets[:, 6:] == batch.inputs[:, :6].flip(1)).all())
        True
    """
    return _function("reverse_string", BITS, lambda bits: bits.flip(1))


def duplicate_string() -> FormalTask:
    """Context-sensitive: a binary string, twice.

    Returns:
        The task. Its answer is twice as long as the string.

    Example:
        >>> duplicate_string().fixed(8, 6, seed=0).inputs.shape
        torch.Size([8, 18])
    """
    return _function("duplicate_string", BITS, lambda bits: bits.repeat(1, 2))


def odds_first() -> FormalTask:
    """Context-sensitive: the symbols of a binary string at places 1, 3, 5, ..., then those at 2, 4, 6, ...

    As in the paper's text; its code puts the even places first.

    Returns:
        The task. Its answer has the length of the string.

    Example:
        >>> batch = odds_first().fixed(8, 6, seed=0)
        >>> bool((batch.targets[:, 6:9] == batch.inputs[:, 0:6:2]).all())
        True
    """
    return _function("odds_first", BITS, lambda bits: torch.cat([bits[:, ::2], bits[:, 1::2]], dim=1))


def bucket_sort() -> FormalTask:
    """Context-sensitive: a string over the digits 0 to 4, sorted.

    Returns:
        The task. Its answer has the length of the string.

    Example:
        >>> batch = bucket_sort().fixed(8, 6, seed=0)
        >>> bool((batch.targets[:, 6:].diff() >= 0).all())
        True
    """
    return _function("bucket_sort", tuple("01234"), lambda digits: digits.sort(1).values)


def missing_duplicate() -> FormalTask:
    """Context-sensitive: a binary string, twice, with a "?" instead of one symbol; which one is missing?

    A string of odd length does not exist; one symbol less is drawn.

    Returns:
        The task. Its answer is one symbol.

    Example:
        >>> task = missing_duplicate()
        >>> task.text(task.fixed(1, 6, seed=0).inputs[0])
        '1 1 ? 1 1 0 _'
    """

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        twice = torch.randint(2, (batch, length // 2), generator=generator).repeat(1, 2)
        place = torch.randint(twice.shape[1], (batch, 1), generator=generator)
        return answered(twice.scatter(1, place, 2), twice.gather(1, place), blank=3)

    return FormalTask("missing_duplicate", (*BITS, "?", BLANK), BITS, make, shortest=2)


def _function(name: str, symbols: tuple[str, ...], answer: Callable[[Tensor], Tensor]) -> FormalTask:
    """Strings over ``symbols``, each of which can be an answer."""

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        strings = torch.randint(len(symbols), (batch, length), generator=generator)
        return answered(strings, answer(strings), blank=len(symbols))

    return FormalTask(name, (*symbols, BLANK), symbols, make)
