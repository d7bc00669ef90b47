"""A formal language as a task: symbols, possible answers, and a function that draws strings and answers them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.check import check_callable, check_integer, check_type
from deqseq.tasks.task import Task, WordBatch

Make = Callable[[int, int, torch.Generator], WordBatch]
"""Draws so many strings of such a length: ``make(batch, length, generator)``."""

BLANK, END = "_", "#"


@dataclass(frozen=True)
class FormalTask(Task):
    """A language of strings with exact answers.

    Args:
        name: short name, as in :data:`TASKS`.
        symbols: the vocabulary, of inputs and answers. The id of a symbol is its position.
        answers: the symbols that can be an answer; chance is one over their number.
        make: ``make(batch, length, generator)`` draws strings and answers them.
        shortest: the least length.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: fewer than two symbols or answers, one twice, or answers that are no symbols.

    Example:
        >>> from deqseq.tasks import formal
        >>> task = formal.reverse_string()
        >>> batch = task.fixed(1, 5, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('1 1 0 0 1 _ _ _ _ _', '. . . . . 1 0 0 1 1')
    """

    name: str
    symbols: tuple[str, ...]
    answers: tuple[str, ...]
    make: Make = field(repr=False, compare=False)
    shortest: int = 1

    def __post_init__(self) -> None:
        check_type("FormalTask.name", self.name, str)
        for name in ("symbols", "answers"):
            given = getattr(self, name)
            check_type(f"FormalTask.{name}", given, tuple, '("0", "1")')
            for symbol in given:
                check_type(f"FormalTask.{name}", symbol, str)
            if len(given) < 2 or len(set(given)) < len(given):
                raise ValueError(f"FormalTask.{name} must be distinct and at least two, got {given}")
        if not set(self.answers) <= set(self.symbols):
            raise ValueError(f"FormalTask.answers must be some of the symbols {self.symbols}, got {self.answers}")
        check_callable("FormalTask.make", self.make)
        check_integer("FormalTask.shortest", self.shortest, 1)

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return len(self.symbols)

    @property
    def chance(self) -> float:
        """One over the number of possible answers."""
        return 1 / len(self.answers)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Draw strings and answer them; users call :meth:`sample`, :meth:`batches` or :meth:`fixed`.

        Args:
            batch: number of strings.
            length: symbols of each string, without the blanks for its answer.
            generator: source of all randomness, on the CPU.

        Returns:
            Inputs and targets, on the CPU.
        """
        return self.make(batch, length, generator)

    def text(self, ids: Int64[Tensor, " length"]) -> str:
        """A row of inputs or targets as symbols.

        Args:
            ids: token ids, `(length,)`; -100 is shown as a dot.

        Raises:
            TypeError: no tensor.
            ValueError: a tensor of another shape or dtype, or an id of no symbol.
        """
        check_type("ids", ids, Tensor)
        if ids.ndim != 1:
            raise ValueError(f"ids must be one row, (length,), got shape {tuple(ids.shape)}")
        names = dict(enumerate(self.symbols)) | {-100: "."}
        if wrong := [i for i in ids.tolist() if not isinstance(i, int) or i not in names]:
            raise ValueError(f"ids must be 0 to {len(self.symbols) - 1}, or -100, got {wrong[0]}")
        return " ".join(names[i] for i in ids.tolist())


def answered(strings: Int64[Tensor, "batch length"], answers: Int64[Tensor, "batch size"], blank: int) -> WordBatch:
    """The strings with a blank for each symbol of the answer, scored there; -100 among the answers is not scored."""
    inputs = F.pad(strings, (0, answers.shape[1]), value=blank)
    return WordBatch(inputs, F.pad(answers, (strings.shape[1], 0), value=-100))


def uniform(high: Tensor, generator: torch.Generator) -> Tensor:
    """An integer for each of ``high``, uniform over 0 to ``high`` - 1."""
    return (torch.rand(high.shape, generator=generator, dtype=torch.float64) * high).long()
