"""What all tasks share, batches and fixed data sets from a seed; and the word problem."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from deqseq.arguments import (
    Between,
    PositiveInt,
    Within,
    check_ids,
    check_integer,
    check_type,
    checked,
)
from deqseq.tasks.groups import FiniteMonoid, reached

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
        >>> import torch
        >>> from deqseq.tasks import Task, WordBatch
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
        batch: PositiveInt,
        length: int | Iterable[int],
        *,
        seed: Seed,
        device: torch.device | str | None = None,
    ) -> Iterator[WordBatch]:
        """Endless training data, which depend only on the seed.

        Args:
            batch: sequences per batch.
            length: size of the sequences in the unit of the task: tokens of a word problem, swaps
                of :class:`Balls`, assignments of :class:`Programs`; or several sizes, of which each
                batch draws one.
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
        size: PositiveInt,
        length: PositiveInt,
        *,
        seed: Seed,
        device: torch.device | str | None = None,
    ) -> WordBatch:
        """A data set for evaluation: ``size`` sequences of one ``length``, in the unit of
        :meth:`batches`, on a ``device``, by default the CPU.

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


@checked
@dataclass(frozen=True)
class WordProblem(Task):
    r"""State tracking: the prefix products of random elements of a monoid.

    .. math:: p_1 = g_1, \qquad p_t = p_{t-1} \circ g_t

    Token ids are element ids, so inputs and targets share one vocabulary, and every position is
    scored. Tokens :math:`g_t` are independent and uniform over ``inputs``. Then each token becomes
    *easy* with probability ``identity_probability``: it is replaced by the identity, which need not
    be one of ``inputs``. In a direct product, the parts of a token in all groups are replaced, the
    other parts stay. (The paper's harder problem is ``parse_group("A5xM")`` with all elements as
    inputs.)

    Args:
        monoid: the monoid that tokens are elements of.
        inputs: ids of the elements to draw from, without repeats. Default: all elements.
        identity_probability: probability that a token is made easy, 0 to 1.

    Raises:
        ValueError: ``inputs`` is empty, repeats an id or contains an invalid one, the probability
            is out of its range, or it is positive but none of the factors is a group.

    References:
        Merrill et al., The Illusion of State in State-Space Models, 2024, arXiv 2404.08819.
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> from deqseq.tasks import WordProblem
        >>> from deqseq.tasks import generators, parse_group
        >>> task = WordProblem(parse_group("A5"), inputs=generators(parse_group("A5"), 2))
        >>> batch = task.fixed(2, 8, seed=0)
        >>> batch.inputs.shape, bool((batch.inputs[:, 0] == batch.targets[:, 0]).all())
        (torch.Size([2, 8]), True)
    """

    monoid: FiniteMonoid
    inputs: Iterable[int] | None = None
    identity_probability: Annotated[float, Within("[0, 1]")] = 0.0

    def __post_init__(self):
        if self.inputs is not None:
            inputs = tuple(self.inputs)
            for element in inputs:
                check_integer("WordProblem.inputs", element, 0, self.monoid.order - 1)
            if not inputs or len(set(inputs)) != len(inputs):
                raise ValueError(
                    f"WordProblem.inputs must be one or more ids, none of them twice, got {inputs}."
                )
            object.__setattr__(self, "inputs", inputs)  # an iterator could be read only once
        p, factors = self.identity_probability, self.monoid.factors or (self.monoid,)
        if p > 0.0 and not any(factor.is_group for factor in factors):
            raise ValueError(
                f"identity_probability must be 0 for {self.monoid.name}, which has no group "
                f"factor, got {p}."
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the order of the monoid."""
        return self.monoid.order

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Ids that tokens are drawn from; easy tokens may have others."""
        return tuple(range(self.monoid.order)) if self.inputs is None else tuple(self.inputs)

    @property
    def chance(self) -> float:
        """One over the number of products that one or more inputs can have."""
        inputs = list(self.input_ids)
        products = reached(self.monoid.table, self.monoid.identity, inputs)
        return 1 / len(self.monoid.table[products][:, inputs].unique())

    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Draw sequences and their prefix products.

        With the same state of the generator, problems that differ only in ``identity_probability``
        draw the same tokens before some become easy. A token that is easy at one probability is
        easy at every larger one.
        """
        table, device = self.monoid.table, generator.device
        options = {"generator": generator, "device": device}
        ids = table.new_tensor(self.input_ids)
        drawn = ids[torch.randint(len(ids), (batch, length), **options)]
        chance = torch.rand(batch, length, dtype=torch.float64, **options)
        inputs = torch.where(chance < self.identity_probability, self._easy()[drawn], drawn)
        return WordBatch(inputs, prefix_products(self.monoid, inputs))

    @checked
    def hard(self, inputs: Int64[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """Which tokens are not easy: those with another part than the identity in some group.

        The ids ``inputs`` are `(batch, length)`, int64, on any device.

        Raises:
            ValueError: an id that is not an element's.
        """
        check_ids("inputs", inputs, self.vocab_size)
        return self._easy().to(inputs.device)[inputs] != inputs

    def _easy(self) -> Int64[Tensor, " order"]:
        """Ids of the elements with the identity in their group factors."""
        ids = torch.zeros(1, dtype=torch.int64, device="cpu")
        for factor in self.monoid.factors or (self.monoid,):
            part = torch.arange(factor.order, device="cpu")
            if factor.is_group:
                part = part.fill_(factor.identity)
            ids = (ids[:, None] * factor.order + part).flatten()
        return ids


@checked
def prefix_products(
    monoid: FiniteMonoid, tokens: Int64[Tensor, "batch length"]
) -> Int64[Tensor, "batch length"]:
    r"""The products of all prefixes.

    .. math:: p_t = g_1 \circ g_2 \circ \dots \circ g_t

    Args:
        monoid: the monoid of the elements.
        tokens: ids of the elements, `(batch, length)`, int64. The result is on the same device.

    Raises:
        TypeError, ValueError: another shape or dtype, or ids that are not in the monoid.

    Example:
        >>> import torch
        >>> from deqseq.tasks import parse_group, prefix_products
        >>> prefix_products(parse_group("Z5"), torch.tensor([[3, 4, 1]]))
        tensor([[3, 2, 3]])
    """
    check_ids("tokens", tokens, monoid.order)
    table, products = monoid.table.to(tokens.device), [tokens[:, 0]]
    for token in tokens[:, 1:].unbind(dim=1):
        products.append(table[products[-1], token])
    return torch.stack(products, dim=1)
