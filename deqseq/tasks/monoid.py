"""Finite monoids as multiplication tables: products, generated ones, generating subsets."""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.check import check_integer, check_type
from deqseq.tasks.maps import composed, is_matrix, read_generators
from deqseq.tasks.tables import check_table, product_table, reached, table_from_steps

Label = int | str | tuple
MAX_ORDER = 1024  # S6 has 720 elements; the table of S7 alone would take 200 MB
MAX_SUBSETS = 10_000  # that `generators` tries before it gives up: a second or two at order 240


@dataclass(frozen=True)
class FiniteMonoid:
    r"""A finite monoid as a multiplication table, checked when it is made; a group if every element has an inverse.

    .. math:: table[a, b] = a \circ b, \quad (a \circ b) \circ c = a \circ (b \circ c), \quad e \circ a = a = a \circ e

    Args:
        name: short name, as :func:`parse_group` reads it where it can.
        elements: distinct labels. The id of an element is its position here. Labels are one-line tuples (1-based) for
            permutations, rows of rows for matrices, integers for Z_n, tuples for products.
        table: ids of the products, `(order, order)`, int64.
        identity: id of the identity.
        factors: the factors of a direct product. Default: it is none.

    Raises:
        ValueError: the table is not that of a monoid, or not the product of ``factors``; names the elements.

    Example:
        >>> minimum = FiniteMonoid("min", ("low", "high"), torch.tensor([[0, 0], [0, 1]]), identity=1)
        >>> minimum.order, minimum.is_group
        (2, False)
    """

    name: str
    elements: tuple[Label, ...] = field(repr=False)
    table: Int64[Tensor, "order order"] = field(repr=False, compare=False)
    identity: int
    factors: "tuple[FiniteMonoid, ...]" = field(default=(), repr=False)
    _content: bytes = field(init=False, repr=False)

    def __post_init__(self):
        check_type("FiniteMonoid.name", self.name, str)
        check_type("FiniteMonoid.elements", self.elements, tuple)
        check_type("FiniteMonoid.table", self.table, Tensor)
        check_integer("FiniteMonoid.identity", self.identity, 0)
        check_type("FiniteMonoid.factors", self.factors, tuple)
        for factor in self.factors:
            check_type("FiniteMonoid.factors", factor, FiniteMonoid)
        for label in self.elements:
            check_type("FiniteMonoid.elements", label, Hashable, '"r2s"')
        # A private copy that cannot change after the check; its bytes represent it in == and hash.
        object.__setattr__(self, "table", self.table.detach().cpu().clone())
        object.__setattr__(self, "_content", self.table.numpy().tobytes())
        check_table(self.name, self.elements, self.table, self.identity)
        if self.factors and not torch.equal(self.table, product_table(tuple(factor.table for factor in self.factors))):
            raise ValueError(f"{self.name}: table is not that of the direct product of its factors.")

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.elements)

    @property
    def is_group(self) -> bool:
        """Whether every element has an inverse."""
        return bool((self.table == self.identity).any(dim=1).all())

    def index(self, element: Label) -> int:
        """Id of the element with the label ``element``; ValueError if there is none."""
        if element not in self.elements:
            raise ValueError(f"{self.name} has no element {element!r}; its last is {self.elements[-1]!r}.")
        return self.elements.index(element)

    def inverse(self, element: int) -> int:
        """Id of the inverse of ``element`` (an id); ValueError if it has none."""
        check_integer("element", element, 0, self.order - 1)
        found = (self.table[element] == self.identity).nonzero()
        if len(found) == 0:
            raise ValueError(f"{self.elements[element]!r} has no inverse in {self.name}.")
        return int(found[0])

    def element_order(self, element: int) -> int:
        """Smallest k >= 1 whose power of ``element`` (an id) is the identity; ValueError if there is none."""
        self.inverse(element)  # without an inverse no power is the identity, and the loop would not end
        power, k = element, 1
        while power != self.identity:
            power, k = int(self.table[power, element]), k + 1
        return k

    def closure(self, subset: Iterable[int]) -> tuple[int, ...]:
        """Ids, ascending, of all products of elements of ``subset`` (ids), the empty product included."""
        subset = check_ids("subset", subset, self)
        return tuple(reached(self.table, self.identity, subset).nonzero().flatten().tolist())


def direct_product(*factors: FiniteMonoid) -> FiniteMonoid:
    r"""The direct product: tuples, multiplied factor by factor.

    .. math:: (a, b, \dots) \circ (a', b', \dots) = (a \circ a', b \circ b', \dots)

    Args:
        *factors: one or more monoids; the product of their orders is at most 1024. A product among them is replaced
            by its factors, so that labels stay flat.

    Returns:
        The product, named after its factors: ``"A5xM"``.

    Raises:
        ValueError: there is no factor, or the product is too large.

    Example:
        >>> from deqseq.tasks import cyclic
        >>> direct_product(cyclic(2), cyclic(2)).elements
        ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    for factor in factors:
        check_type("factors", factor, FiniteMonoid, "cyclic(2)")
    flat = tuple(part for factor in factors for part in (factor.factors or (factor,)))
    if not flat:
        raise ValueError("direct_product() needs at least one factor, got none.")
    if len(flat) == 1:
        return flat[0]
    name = "x".join(factor.name for factor in flat)
    check_integer(f"the order of {name}", math.prod(factor.order for factor in flat), 1, MAX_ORDER)
    elements = tuple(itertools.product(*(factor.elements for factor in flat)))
    identity = elements.index(tuple(factor.elements[factor.identity] for factor in flat))
    return FiniteMonoid(name, elements, product_table(tuple(factor.table for factor in flat)), identity, factors=flat)


def generated_monoid(
    generators: Sequence[tuple], *, modulus: int | None = None, name: str = "generated"
) -> FiniteMonoid:
    r"""All products of some permutations, maps or square matrices, with the identity.

    A map of the points 1 to n is a tuple in one-line notation, (b(1), ..., b(n)), and :math:`(a \circ b)(i) = a(b(i))`.
    Permutations generate a group; other maps do not: the transition maps of a finite automaton generate its transition
    monoid. A matrix is a tuple of rows of integers, and :math:`a \circ b` is the matrix product.

    Args:
        generators: one or more tuples of n integers in 1 to n, or as many n x n matrices.
        modulus: entries of matrices are taken modulo it, at least 2. Default: they are integers.
        name: what the monoid is called.

    Returns:
        The monoid. Its elements are sorted, so that they do not depend on the order of the generators.

    Raises:
        TypeError: a generator is neither a tuple of integers nor one of rows.
        ValueError: no generators, a tuple that is no map of 1 to n, a matrix that is not square, sizes that differ, a
            modulus for maps, or more than 1024 products.

    Example:
        >>> generated_monoid([(2, 1, 3), (2, 3, 1)], name="S3").elements
        ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1))

        The matrices of determinant 1 modulo 5, and the automaton that tells whether the last letter was an "a".

        >>> generated_monoid([((1, 1), (0, 1)), ((1, 0), (1, 1))], modulus=5).order
        120
        >>> generated_monoid([(2, 2), (1, 1)]).is_group
        False
    """
    check_type("generators", generators, Sequence, "[(2, 1, 3), (2, 3, 1)]")
    check_type("name", name, str)
    maps, identity = read_generators(tuple(generators), modulus)
    found, ids, steps = [identity], {identity: 0}, []
    for element in found:  # grows while it is read
        steps.append([])
        for generator in maps:
            product = composed(element, generator, modulus)
            if product not in ids:
                if len(found) == MAX_ORDER:
                    remedy = "give fewer generators" + ", or a modulus" * (modulus is None and is_matrix(identity))
                    raise ValueError(f"generators must have at most {MAX_ORDER} products, got more: {remedy}")
                ids[product] = len(found)
                found.append(product)
            steps[-1].append(ids[product])
    table = table_from_steps(torch.tensor(steps))
    order = torch.tensor(sorted(range(len(found)), key=found.__getitem__))
    table = order.argsort()[table[order][:, order]]
    return FiniteMonoid(name, tuple(sorted(found)), table, int(order.argsort()[0]))


def generators(monoid: FiniteMonoid, count: int) -> tuple[int, ...]:
    """The canonical generating subset of a given size, as ids.

    S_n: (2, 1, 3, ...) and the n-cycle (2, ..., n, 1). A_n: the cycle of all points (n odd) or all but 1, and
    (2, 3, 1, 4, ...). Otherwise the first subset that generates, ids in lexicographic order, no identity.

    Args:
        monoid: what to generate.
        count: size of the subset.

    Returns:
        Ids, as many as ``count``.

    Raises:
        ValueError: none of the first 10,000 subsets of that size generates the monoid.

    Example:
        >>> from deqseq.tasks import alternating
        >>> a5 = alternating(5)
        >>> [a5.elements[g] for g in generators(a5, 2)]
        [(2, 3, 4, 5, 1), (2, 3, 1, 4, 5)]
    """
    check_type("monoid", monoid, FiniteMonoid, "alternating(5)")
    check_integer("count", count, 1, monoid.order)
    others = [a for a in range(monoid.order) if a != monoid.identity]
    subsets = itertools.chain(_family_generators(monoid), itertools.combinations(others, count))
    for subset in itertools.islice(subsets, MAX_SUBSETS):
        if len(subset) == count and reached(monoid.table, monoid.identity, subset).all():
            return subset
    raise ValueError(f"Found no {count} elements that generate {monoid.name} in up to {MAX_SUBSETS} subsets.")


def _family_generators(monoid: FiniteMonoid) -> list[tuple[int, ...]]:
    n = len(monoid.elements[0]) if isinstance(monoid.elements[0], tuple) else 0
    points = tuple(range(1, n + 1))
    pair: tuple[Label, ...] = ()
    if monoid.name == f"S{n}" and n >= 3:
        pair = (2, 1, *points[2:]), (*points[1:], 1)
    if monoid.name == f"A{n}" and n >= 4:
        still = 1 - n % 2  # a cycle of even length is odd: for even n, leave the point 1 alone
        pair = (*points[:still], *points[still + 1 :], points[still]), (2, 3, 1, *points[3:])
    known = pair and set(pair) <= set(monoid.elements)  # another monoid may have the name
    return [tuple(map(monoid.index, pair))] if known else []


def check_ids(name: str, ids: Iterable[int], monoid: FiniteMonoid) -> tuple[int, ...]:
    """The ids of elements as a tuple; anything else is an error."""
    check_type(name, ids, Iterable)
    for element in (known := tuple(ids)):
        check_integer(name, element, 0, monoid.order - 1)
    return known
