"""Formal languages with exact answers: a string, then a blank for each symbol of the answer.

The tasks are some of Delétang et al., Neural Networks and the Chomsky Hierarchy, ICLR 2023, arXiv
2207.02098. The answer is scored at the blanks. A length is that of the string.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.tasks import Task, WordBatch

MODULUS = 5
NUMBERS = tuple(map(str, range(MODULUS)))
PLUS, MINUS, TIMES, OPEN, CLOSE = range(MODULUS, MODULUS + 5)
"""Ids of the other symbols of arithmetic."""

Draw = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
"""Draws strings and their answers: ``draw(batch, length, generator)``, each (batch, symbols)."""


@dataclass(frozen=True)
class FormalTask(Task):
    """A language of strings with exact answers.

    Args:
        name: short name, as in :data:`TASKS`.
        symbols: of the strings. The id of a symbol is its position; the blank comes after them.
        answers: number of possible answers, the first of the symbols.
        strings: draws strings and their answers.
    """

    name: str
    symbols: tuple[str, ...]
    answers: int
    strings: Draw = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """Number of symbols, with the blank."""
        return len(self.symbols) + 1

    @property
    def chance(self) -> float:
        """One over the number of possible answers."""
        return 1 / self.answers

    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Strings with blanks after them, and the answers at the blanks."""
        strings, answers = self.strings(batch, length, generator)
        inputs = F.pad(strings, (0, answers.shape[1]), value=len(self.symbols))
        return WordBatch(inputs, F.pad(answers, (strings.shape[1], 0), value=-100))

    def text(self, ids: Int64[Tensor, " length"]) -> str:
        """A row of inputs or targets as symbols; "_" is the blank, a dot is not scored."""
        names = dict(enumerate((*self.symbols, "_"))) | {-100: "."}
        return " ".join(names[i] for i in ids.tolist())


def of_uniform(
    symbols: str, answer: Callable[[Tensor], Tensor]
) -> tuple[tuple[str, ...], int, Draw]:
    """Strings that are uniform over all strings of some symbols, each of which can be an answer."""

    def draw(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        strings = torch.randint(len(symbols), (batch, length), generator=generator)
        return strings, answer(strings)

    return tuple(symbols), len(symbols), draw


def walks(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Steps on a cycle of five places, and the place after them, from 0."""
    walk = torch.randint(3, (batch, length), generator=generator)
    return walk + 5, torch.tensor([0, 1, -1])[walk].sum(1, keepdim=True) % 5


def plain(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Expressions such as 3 - 2 * 4 and their values; of an even length, one symbol less."""
    count = (length - 1) // 2
    numbers = torch.randint(MODULUS, (batch, count + 1), generator=generator)
    operators = torch.randint(3, (batch, count), generator=generator)
    strings = torch.empty(batch, 2 * count + 1, dtype=torch.int64)
    strings[:, ::2], strings[:, 1::2] = numbers, PLUS + operators
    total, term = torch.zeros(batch, dtype=torch.int64), numbers[:, 0]
    for operator, number in zip(operators.T, numbers[:, 1:].T, strict=True):
        times = operator == 2
        total = torch.where(times, total, total + term)
        term = torch.where(times, term * number % MODULUS, number * (1 - 2 * operator))
    return strings, ((total + term) % MODULUS)[:, None]


def bracketed(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Expressions such as ((2) * (4 - -3)) and their values.

    An expression is (left operator right), where left and right share the rest of the length at
    random; expressions of up to four symbols are d, -d, (d) and (-d). All strings are divided at
    once, one depth after the other.
    """
    start, size = torch.arange(batch) * length, torch.full((batch,), length)
    depths, cuts = [], []
    while len(start):
        inner = size > 4
        depths.append((start, size, inner))
        start, size = start[inner], size[inner]
        left = (
            1
            + (torch.rand(size.shape, generator=generator, dtype=torch.float64) * (size - 4)).long()
        )
        cuts.append(start + 1 + left)  # where the operators are
        start, size = torch.cat([start + 1, cuts[-1] + 1]), torch.cat([left, size - left - 3])

    start, size, inner = (torch.cat(parts) for parts in zip(*depths, strict=True))
    number = torch.randint(MODULUS, size.shape, generator=generator)
    operator = torch.randint(3, size.shape, generator=generator)
    signed, place = ~inner & (size % 2 == 0), start + size // 2
    strings = torch.empty(batch * length, dtype=torch.int64)
    strings[start[size > 2]] = OPEN
    strings[(start + size)[size > 2] - 1] = CLOSE
    strings[place[~inner]] = number[~inner]
    strings[place[signed] - 1] = MINUS
    strings[torch.cat(cuts)] = PLUS + operator[inner]

    counts = [len(part) for part, _, _ in depths]
    parts = (torch.where(signed, -number, number), operator, inner)
    levels = list(zip(*(part.split(counts) for part in parts), strict=True))
    below = torch.empty(0, dtype=torch.int64)  # values of the parts, the deepest first
    for value, chosen, inside in reversed(levels):
        chosen, a, b = chosen[inside], below[: len(below) // 2], below[len(below) // 2 :]
        results = torch.where(chosen == 0, a + b, torch.where(chosen == 1, a - b, a * b))
        below = value.masked_scatter(inside, results) % MODULUS
    return strings.view(batch, length), below[:, None]


TASKS = {
    task.name: task
    for task in (
        FormalTask("even_pairs", *of_uniform("01", lambda bits: bits[:, :1] ^ bits[:, -1:])),
        FormalTask("parity_check", *of_uniform("01", lambda bits: bits.sum(1, keepdim=True) % 2)),
        FormalTask("cycle_navigation", (*NUMBERS, "=", "+", "-"), 5, walks),
        FormalTask("modular_arithmetic", (*NUMBERS, *"+-*"), MODULUS, plain),
        FormalTask("modular_arithmetic_brackets", (*NUMBERS, *"+-*()"), MODULUS, bracketed),
        FormalTask("reverse_string", *of_uniform("01", lambda bits: bits.flip(1))),
        FormalTask("bucket_sort", *of_uniform("01234", lambda digits: digits.sort(1).values)),
        FormalTask("duplicate_string", *of_uniform("01", lambda bits: bits.repeat(1, 2))),
        FormalTask(
            "odds_first",
            *of_uniform("01", lambda bits: torch.cat([bits[:, ::2], bits[:, 1::2]], dim=1)),
        ),
    )
}
"""All tasks by name: three regular ones, arithmetic, and some whose answer is a string."""
