"""What all tasks share: batches and fixed data sets from a seed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import AtLeast, Between, check_ids, check_integer, check_type, checked

Size = Annotated[int, AtLeast(1)]
Seed = Annotated[int, Between(0, 2**31 - 1)]
"""torch's generator on the CPU takes 32 bits, of which one separates training and evaluation."""


class WordBatch(NamedTuple):
    """Sequences of tokens, and the answer at every scored position.

    Attributes:
        inputs: token ids, `(batch, length)`.
        targets: token ids of the answers, `(batch, length)`; -100 at positions that are not scored.
    """

    inputs: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]


class Task(ABC):
    """A sequence task with exact answers.

    Your own task defines ``vocab_size``, ``chance`` and ``draw``, and is then sampled like the
    others.

    Example:
        >>> class Copy(Task):
        ...     vocab_size, chance = 8, 1 / 8
        ...
        ...     def draw(self, batch, length, generator):
        ...         tokens = torch.randint(8, (batch, length), generator=generator)
        ...         return WordBatch(tokens, tokens)
        >>> next(Copy().batches(4, (8, 16), seed=0)).inputs.shape[0]
        4
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids; inputs and targets share one vocabulary."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Expected accuracy of uniform guesses among the possible answers."""

    @abstractmethod
    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Draw ``batch`` sequences of one ``length``, and their answers, on the CPU.

        The ``generator``, on the CPU, is the source of all randomness. The result is checked.
        """

    @checked
    def batches(
        self,
        batch: Size,
        length: int | Iterable[int],
        *,
        seed: Seed,
        device: torch.device | str | None = None,
    ) -> Iterator[WordBatch]:
        """Endless training data, which depend only on the seed.

        Args:
            batch: sequences per batch.
            length: length of the strings, or several lengths; each batch draws one uniformly.
            seed: 0 to 2**31 - 1. The data are independent of those of :meth:`fixed`, for any seed
                there.
            device: device of the batches. Default: the CPU.

        Raises:
            ValueError: a number is out of its range, or there are no lengths.
        """
        lengths = tuple(length) if isinstance(length, Iterable) else (length,)
        device = _device(device)
        if not lengths:
            raise ValueError("length must name at least one length, got none.")
        for size in lengths:
            check_integer("length", size, 1)
        generator = _seeded(seed, stream=0)

        def endless() -> Iterator[WordBatch]:  # a function inside: the checks run at the call
            while True:
                place = torch.randint(len(lengths), (), generator=generator, device="cpu")
                yield self._drawn(batch, lengths[int(place)], generator, device)

        return endless()

    @checked
    def fixed(
        self,
        size: Size,
        length: Size,
        *,
        seed: Seed,
        device: torch.device | str | None = None,
    ) -> WordBatch:
        """A fixed data set for evaluation: ``size`` strings of a ``length``, on a ``device``.

        The same ``seed``, 0 to 2**31 - 1, gives the same data, which are independent of those of
        :meth:`batches`.
        """
        return self._drawn(size, length, _seeded(seed, stream=1), _device(device))

    def _drawn(
        self, batch: int, length: int, generator: torch.Generator, device: torch.device
    ) -> WordBatch:
        drawn = self.draw(int(batch), int(length), generator)
        check_type("the value of draw", drawn, WordBatch, "WordBatch(inputs, targets)")
        inputs, targets = drawn
        for part in drawn:
            check_type("the parts of what draw returns", part, Tensor)
            if part.device.type != "cpu":
                raise ValueError(f"draw must return tensors on the CPU, got one on {part.device}")
        kinds = {(part.dtype, part.ndim) for part in drawn}
        if kinds != {(torch.int64, 2)} or inputs.shape != targets.shape:
            got = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in drawn)
            raise ValueError(
                "draw must return ids and answers, int64 and of one shape (batch, length), "
                f"got {got}"
            )
        if len(inputs) != batch:
            raise ValueError(f"draw must return {batch} rows, got {len(inputs)}")
        check_ids("the inputs of draw", inputs, self.vocab_size)
        check_ids("the targets of draw", targets.where(targets != -100, 0), self.vocab_size)
        return WordBatch(inputs.to(device), targets.to(device))


def _device(device: torch.device | str | None) -> torch.device:
    """Where batches go; ValueError for a name that torch does not know."""
    try:
        return torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device must be one of torch's, got {device!r}: {error}") from error


def _seeded(seed: int, *, stream: int) -> torch.Generator:
    # Training takes even seeds, evaluation odd ones: their data differ for the same seed.
    return torch.Generator().manual_seed(2 * int(seed) + stream)
