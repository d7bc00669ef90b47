"""The word problem: given a sequence of group elements, predict every prefix product."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import Within, check_ids, check_integer, checked
from deqseq.tasks.monoid import FiniteMonoid, reached
from deqseq.tasks.task import Task, WordBatch


@checked
@dataclass(frozen=True)
class WordProblem(Task):
    r"""State tracking: the prefix products of random elements of a monoid.

    .. math:: p_1 = g_1, \qquad p_t = p_{t-1} \circ g_t

    Token ids are element ids, so inputs and targets share one vocabulary, and every position is
    scored. Tokens :math:`g_t` are independent and uniform over ``inputs``. Then each token becomes
    *easy* with probability ``identity_probability``: it is replaced by the identity, which need not
    be one of ``inputs``. In a direct product, all factors that are groups are replaced together;
    the other factors stay random. (The paper's harder problem is ``parse_group("A5xM")`` with all
    elements as inputs.)

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
        easy_ids = table.new_zeros(1)  # ids of elements with the identity in their group factors
        for factor in self.monoid.factors or (self.monoid,):
            part = torch.arange(factor.order, device=table.device)
            if factor.is_group:
                part = part.fill_(factor.identity)
            easy_ids = (easy_ids[:, None] * factor.order + part).flatten()
        inputs = torch.where(chance < self.identity_probability, easy_ids[drawn], drawn)
        return WordBatch(inputs, prefix_products(self.monoid, inputs))


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
        >>> from deqseq.tasks import parse_group, prefix_products
        >>> prefix_products(parse_group("Z5"), torch.tensor([[3, 4, 1]]))
        tensor([[3, 2, 3]])
    """
    check_ids("tokens", tokens, monoid.order)
    table, products = monoid.table.to(tokens.device), [tokens[:, 0]]
    for token in tokens[:, 1:].unbind(dim=1):
        products.append(table[products[-1], token])
    return torch.stack(products, dim=1)
