"""The word problem: given a sequence of group elements, predict every prefix product."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.check import check_number, check_type
from deqseq.tasks.monoid import FiniteMonoid, check_ids
from deqseq.tasks.task import Task, WordBatch


@dataclass(frozen=True)
class WordProblem(Task):
    r"""State tracking: the prefix products of random elements of a monoid.

    .. math:: p_1 = g_1, \qquad p_t = p_{t-1} \circ g_t

    Token ids are element ids, so inputs and targets share one vocabulary, and every position is scored. Tokens
    :math:`g_t` are independent and uniform over ``inputs``. Then each token becomes *easy* with probability
    ``identity_probability``: its group element is replaced by the identity. In a direct product, all factors that are
    groups are replaced together; the other factors stay random. An easy token need not be one of ``inputs``. (The paper
    calls the other tokens hard, although a uniform draw can be the identity too. Its harder problem is
    ``parse_group("A5xM")`` with all elements as inputs, trained with probabilities of 0 to 1 at length 256, and tested
    with 0.5 and 0.9 at 256 and 1024.)

    Args:
        monoid: where the tokens live.
        inputs: ids of the elements to draw from, without repeats. Default: all elements.
        identity_probability: probability that a token is made easy, in [0, 1].

    Raises:
        ValueError: ``inputs`` is empty, repeats an id or contains an invalid one, the probability is out of its range,
            or it is positive and no factor is a group.

    References:
        Merrill et al., The Illusion of State in State-Space Models, 2024, arXiv 2404.08819.
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> from deqseq.tasks import WordProblem, alternating, generators
        >>> a5 = alternating(5)
        >>> task = WordProblem(a5, inputs=generators(a5, 2))
        >>> batch = task.sample(2, 8, generator=torch.Generator().manual_seed(0))
        >>> batch.inputs.shape, bool((batch.inputs[:, 0] == batch.targets[:, 0]).all())
        (torch.Size([2, 8]), True)
    """

    monoid: FiniteMonoid
    inputs: Sequence[int] | None = None
    identity_probability: float = 0.0

    def __post_init__(self):
        check_type("WordProblem.monoid", self.monoid, FiniteMonoid, "alternating(5)")
        check_number("WordProblem.identity_probability", self.identity_probability, "[0, 1]")
        if self.inputs is not None:
            check_type("WordProblem.inputs", self.inputs, Iterable, "(0, 1)")
            object.__setattr__(self, "inputs", tuple(self.inputs))  # hashable and immutable
            _check_inputs(self.inputs, self.monoid)
        p = self.identity_probability
        if p > 0.0 and not any(factor.is_group for factor in _factors(self.monoid)):
            name = self.monoid.name
            raise ValueError(f"identity_probability must be 0 for {name}, which has no group factor, got {p}.")

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
        return 1 / len(self.monoid.table[list(self.monoid.closure(inputs))][:, inputs].unique())

    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Draw sequences and their prefix products; users call :meth:`sample`, :meth:`batches` or :meth:`fixed`.

        From one state of the generator, problems that differ only in ``identity_probability`` draw the same tokens
        before some become easy, and a token that is easy at p is easy at every larger p.

        Args:
            batch: number of sequences.
            length: tokens per sequence.
            generator: source of all randomness, on the CPU.

        Returns:
            Inputs and targets, on the CPU.
        """
        ids = torch.tensor(self.input_ids)
        inputs = ids[torch.randint(len(ids), (batch, length), generator=generator)]
        easy = torch.rand(batch, length, generator=generator, dtype=torch.float64) < self.identity_probability
        inputs = torch.where(easy, _without_group_part(self.monoid)[inputs], inputs)
        return WordBatch(inputs, prefix_products(self.monoid, inputs))


def prefix_products(monoid: FiniteMonoid, tokens: Int64[Tensor, "batch length"]) -> Int64[Tensor, "batch length"]:
    r"""The products of all prefixes.

    .. math:: p_t = g_1 \circ g_2 \circ \dots \circ g_t

    Args:
        monoid: where the product is taken.
        tokens: ids of the elements, `(batch, length)`, int64.

    Returns:
        Ids of the products, ``(batch, length)``, on the device of the tokens.

    Raises:
        ValueError: the tokens have another shape or dtype, or are no ids of the monoid.

    Example:
        >>> from deqseq.tasks import cyclic, prefix_products
        >>> prefix_products(cyclic(5), torch.tensor([[3, 4, 1]]))
        tensor([[3, 2, 3]])
    """
    check_type("monoid", monoid, FiniteMonoid, "cyclic(5)")
    check_type("tokens", tokens, Tensor)
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64 (batch, length), got {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.device.type != "meta" and not 0 <= int(tokens.min()) <= int(tokens.max()) < monoid.order:
        raise ValueError(f"tokens must lie in 0..{monoid.order - 1}, got {int(tokens.min())}..{int(tokens.max())}")
    return _scan(monoid.table.to(tokens.device), tokens)


def _scan(table: Tensor, tokens: Tensor) -> Tensor:
    # Multiply adjacent pairs, scan the half as long sequence, fill in: 2 x length products, O(log length) steps.
    # Measured on order 240, one CPU thread, (512, 256) / (64, 1024): 2.1 / 1.0 ms; Hillis-Steele, which makes
    # length x log(length) products, 4.3 / 2.6 ms; a loop over the length 2.7 / 6.6 ms.
    length = tokens.shape[1]
    if length < 2:
        return tokens.clone()
    odd = _scan(table, table[tokens[:, : length - 1 : 2], tokens[:, 1::2]])
    prefix = tokens.clone()
    prefix[:, 1::2] = odd
    prefix[:, 2::2] = table[odd[:, : (length - 1) // 2], tokens[:, 2::2]]
    return prefix


def _factors(monoid: FiniteMonoid) -> tuple[FiniteMonoid, ...]:
    return monoid.factors or (monoid,)


def _without_group_part(monoid: FiniteMonoid) -> Int64[Tensor, "order"]:
    """For each element, the one whose components in factors that are groups are the identity."""
    changed = torch.zeros(1, dtype=torch.int64)
    for factor in _factors(monoid):
        part = torch.full((factor.order,), factor.identity) if factor.is_group else torch.arange(factor.order)
        changed = (changed[:, None] * factor.order + part).flatten()
    return changed


def _check_inputs(inputs: Sequence[int] | None, monoid: FiniteMonoid) -> None:
    if not inputs:
        raise ValueError("inputs must name at least one element id, got none (None draws from all elements).")
    check_ids("WordProblem.inputs", inputs, monoid)
    if len(set(inputs)) != len(inputs):
        raise ValueError(f"inputs must not repeat an id, got {tuple(inputs)}.")
