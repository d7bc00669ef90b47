"""Finite monoids as multiplication tables."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import AtLeast, check_integer, checked

Label = int | str | tuple
MAX_ORDER = 1024  # S6 has 720 elements; the table of S7 alone would take 200 MB
MAX_SUBSETS = 10_000  # tried by `generators`: a second or two at order 240


@checked
@dataclass(frozen=True, eq=False)
class FiniteMonoid:
    r"""A finite monoid as a multiplication table; a group if every element has an inverse.

    .. math:: table[a, b] = a \circ b, \quad (a \circ b) \circ c = a \circ (b \circ c), \quad e
    \circ a = a = a \circ e

    Args:
        name: short name, one that :func:`parse_group` reads if possible.
        elements: distinct labels; the id of an element is its position here.
        table: ids of the products, `(order, order)`, int64.
        identity: id of the identity.

    Attributes:
        factors: the factors of a :func:`direct_product`; empty for other monoids.

    Raises:
        ValueError: a repeated label, a table of another shape or with ids out of range, an
            ``identity`` that is not one, or products that are not associative.
        TypeError: a label that is not hashable.

    Example:
        >>> minimum = FiniteMonoid(
        ...     "min", ("low", "high"), torch.tensor([[0, 0], [0, 1]]), identity=1
        ... )
        >>> minimum.order, minimum.is_group
        (2, False)
    """

    name: str
    elements: tuple[Label, ...] = field(repr=False)
    table: Int64[Tensor, "order order"] = field(repr=False)
    identity: Annotated[int, AtLeast(0)]
    factors: "tuple[FiniteMonoid, ...]" = field(default=(), init=False, repr=False)

    def __post_init__(self):
        order = len(self.elements)
        table = self.table.detach().cpu().clone()  # a copy cannot change after the checks
        object.__setattr__(self, "table", table)
        try:
            distinct = set(self.elements)
        except TypeError as error:
            raise TypeError(f"{self.name}: elements must be hashable labels: {error}") from error
        if order == 0 or len(distinct) != order:
            raise ValueError(
                f"{self.name}: elements must be distinct and at least one, got {self.elements!r}."
            )
        if table.shape != (order, order) or table.dtype != torch.int64:
            got = f"{table.dtype} {tuple(table.shape)}"
            raise ValueError(f"{self.name}: table must be torch.int64 {(order, order)}, got {got}.")
        if table.min() < 0 or table.max() >= order:
            raise ValueError(
                f"{self.name}: table must hold ids 0 to {order - 1}, "
                f"got {table.min()} to {table.max()}."
            )
        identity, ids = self.identity, torch.arange(order, device="cpu")
        neutral = identity < order and torch.equal(table[identity], ids)
        if not neutral or not torch.equal(table[:, identity], ids):
            raise ValueError(f"{self.name}: the element with id {identity} is not the identity.")
        self._check_associative()

    def _check_associative(self) -> None:
        """Light's test: the middle factors of some elements that generate all others are enough."""
        table, subset = self.table, []
        mask = reached(table, self.identity, subset)
        while not mask.all():
            subset.append(int((~mask).nonzero()[0]))
            mask = reached(table, self.identity, subset)
        for element in subset:
            left, right = table[table[:, element]], table[:, table[element]]
            if not torch.equal(left, right):
                label = self.elements[element]
                raise ValueError(
                    f"{self.name}: table must be associative, but (a ∘ {label}) ∘ b is not "
                    f"a ∘ ({label} ∘ b) for some a and b."
                )

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.elements)

    @property
    def is_group(self) -> bool:
        """Whether every element has an inverse."""
        return bool((self.table == self.identity).any(dim=1).all())


@checked
def direct_product(*factors: FiniteMonoid) -> FiniteMonoid:
    r"""The direct product: tuples, multiplied factor by factor.

    .. math:: (a, b, \dots) \circ (a', b', \dots) = (a \circ a', b \circ b', \dots)

    Args:
        *factors: one or more monoids; the product of their orders is at most 1024. A product among
            them is replaced by its factors, so that labels stay flat.

    Raises:
        ValueError: there is no factor, or the product is too large.

    Example:
        >>> from deqseq.tasks import parse_group
        >>> direct_product(parse_group("Z2"), parse_group("Z2")).elements
        ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    flat = tuple(part for factor in factors for part in (factor.factors or (factor,)))
    if not flat:
        raise ValueError("direct_product() needs at least one factor, got none.")
    if len(flat) == 1:
        return flat[0]
    name = "x".join(factor.name for factor in flat)
    check_integer(f"the order of {name}", math.prod(factor.order for factor in flat), 1, MAX_ORDER)
    elements = tuple(itertools.product(*(factor.elements for factor in flat)))
    identity = elements.index(tuple(factor.elements[factor.identity] for factor in flat))
    table = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    for factor in flat:  # the id of (a, b) is a * order + b
        products = table[:, None, :, None] * factor.order + factor.table[:, None]
        table = products.flatten(2).flatten(0, 1)
    product = FiniteMonoid(name, elements, table, identity)
    object.__setattr__(product, "factors", flat)
    return product


@checked
def generators(monoid: FiniteMonoid, count: Annotated[int, AtLeast(1)]) -> tuple[int, ...]:
    """The canonical generating subset of a given size, as ids.

    S_n: (2, 1, 3, ...) and the n-cycle (2, ..., n, 1). A_n: the cycle of all points (n odd) or all
    but 1, and (2, 3, 1, 4, ...). Otherwise the first subset without the identity that generates, in
    lexicographic order of the ids.

    Args:
        monoid: the monoid to generate.
        count: size of the subset.

    Raises:
        ValueError: none of the first 10,000 subsets of that size generates the monoid.

    Example:
        >>> from deqseq.tasks import parse_group
        >>> a5 = parse_group("A5")
        >>> [a5.elements[g] for g in generators(a5, 2)]
        [(2, 3, 4, 5, 1), (2, 3, 1, 4, 5)]
    """
    others = [a for a in range(monoid.order) if a != monoid.identity]
    subsets = itertools.chain(_family_generators(monoid), itertools.combinations(others, count))
    for subset in itertools.islice(subsets, MAX_SUBSETS):
        if len(subset) == count and reached(monoid.table, monoid.identity, subset).all():
            return subset
    raise ValueError(
        f"count must be one for which {monoid.name} is generated within {MAX_SUBSETS} subsets, "
        f"got {count}"
    )


def _family_generators(monoid: FiniteMonoid) -> list[tuple[int, ...]]:
    """The two permutations that `generators` names, for S_n and A_n only."""
    first = monoid.elements[0]
    n = len(first) if isinstance(first, tuple) else 0
    points = tuple(range(1, n + 1))
    pair: tuple[Label, ...] = ()
    if monoid.name == f"S{n}" and n >= 3:
        pair = (2, 1, *points[2:]), (*points[1:], 1)
    elif monoid.name == f"A{n}" and n >= 4:
        # A cycle of even length is odd, so for an even n the point 1 stays where it is.
        stays, cycle = points[: 1 - n % 2], points[1 - n % 2 :]
        pair = (*stays, *cycle[1:], cycle[0]), (2, 3, 1, *points[3:])
    if not pair or not set(pair) <= set(monoid.elements):  # another monoid may have the name
        return []
    return [tuple(map(monoid.elements.index, pair))]


def reached(table: Tensor, identity: int, subset: Iterable[int]) -> Tensor:
    """Mask of the products ((a ∘ b) ∘ c) ∘ ... of elements of `subset`, with the empty product."""
    mask = torch.zeros_like(table[0], dtype=torch.bool)
    steps, frontier = table[:, list(subset)], table.new_tensor([identity])
    while len(frontier):
        mask[frontier] = True
        products = steps[frontier].flatten()
        frontier = products[~mask[products]].unique()  # the number of repeats would grow
    return mask
