"""Finite groups and monoids as multiplication tables."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.check import check_integer, check_type
from deqseq.tasks.tables import check_table, product_table, reached

Label = int | str | tuple
MAX_ORDER = 1024  # S6 has 720 elements; the table of S7 alone would take 200 MB
MAX_SUBSETS = 10_000  # that `generators` tries before it gives up: a second or two at order 240


@dataclass(frozen=True)
class FiniteMonoid:
    """A finite monoid as a checked multiplication table; a group if every element has an inverse.

        table[a, b] = a ∘ b,    (a ∘ b) ∘ c = a ∘ (b ∘ c),    identity ∘ a = a = a ∘ identity

    Args:
        name: Short name, as `parse_group` reads it where it can.
        elements: Distinct labels. The id of an element is its position here. Labels are one-line tuples (1-based)
            for permutations, integers for Z_n, tuples for products.
        table: Ids of the products, `(order, order)`.
        identity: Id of the identity.
        factors: The factors of a direct product, or empty.

    Raises:
        ValueError: If the table is not that of a monoid, or not the product of `factors`; names the elements.

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
        """Id of the element with the label `element`; ValueError if there is none."""
        if element not in self.elements:
            raise ValueError(f"{self.name} has no element {element!r}; its last is {self.elements[-1]!r}.")
        return self.elements.index(element)

    def inverse(self, element: int) -> int:
        """Id of the inverse of `element` (an id); ValueError if it has none."""
        check_integer("element", element, 0, self.order - 1)
        found = (self.table[element] == self.identity).nonzero()
        if len(found) == 0:
            raise ValueError(f"{self.elements[element]!r} has no inverse in {self.name}.")
        return int(found[0])

    def element_order(self, element: int) -> int:
        """Smallest k >= 1 with `element`^k = identity (element is an id); ValueError if there is none."""
        self.inverse(element)  # without an inverse no power is the identity, and the loop would not end
        power, k = element, 1
        while power != self.identity:
            power, k = int(self.table[power, element]), k + 1
        return k

    def closure(self, subset: Iterable[int]) -> tuple[int, ...]:
        """Ids, ascending, of all products of elements of `subset` (ids), the empty product included."""
        subset = check_ids("subset", subset, self)
        return tuple(reached(self.table, self.identity, subset).nonzero().flatten().tolist())


def symmetric(n: int) -> FiniteMonoid:
    """The symmetric group S_n: permutations of 1..n in lexicographic one-line notation; (a ∘ b)(i) = a(b(i)).

    Args:
        n: Number of points, 1 to 6; else ValueError, because the table of S7 would be too large.

    Example:
        >>> s3 = symmetric(3)
        >>> s3.elements[s3.table[s3.index((2, 1, 3)), s3.index((2, 3, 1))]]
        (1, 3, 2)
    """
    return _permutation_group("S", n, even_only=False)


def alternating(n: int) -> FiniteMonoid:
    """The alternating group A_n: the even ones of `symmetric`. A5 is not solvable.

    Args:
        n: Number of points, 1 to 6; else ValueError.

    Example:
        >>> alternating(5).order
        60
    """
    return _permutation_group("A", n, even_only=True)


def cyclic(n: int) -> FiniteMonoid:
    """The cyclic group Z_n: 0..n-1 under addition modulo n. Z_2 is parity.

    Args:
        n: Number of elements, 1 to 1024; else ValueError.

    Example:
        >>> int(cyclic(5).table[3, 4])
        2
    """
    check_integer("n", n, 1, MAX_ORDER)
    numbers = torch.arange(n)
    return FiniteMonoid(f"Z{n}", tuple(range(n)), (numbers[:, None] + numbers) % n, identity=0)


def direct_product(*factors: FiniteMonoid) -> FiniteMonoid:
    """The direct product: tuples, multiplied factor by factor.

        (a, b, ...) ∘ (a', b', ...) = (a ∘ a', b ∘ b', ...)

    Args:
        *factors: One or more monoids; the product of their orders is at most 1024. A product among them is replaced
            by its factors, so that labels stay flat.

    Raises:
        ValueError: If there is no factor, or the product is too large.

    Example:
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


def aperiodic_monoid() -> FiniteMonoid:
    """The aperiodic monoid {E, A, B, X} of the harder word problem, with the table of the reference.

             E  A  B  X
        E    E  A  B  X        E: the identity          X: absorbs everything
        A    A  X  X  X        A ∘ A = A ∘ B = X        (no letter may follow an A)
        B    B  A  B  X        B ∘ A = A, B ∘ B = B     (a B before a letter is forgotten)

    Aperiodic: powers never cycle (A² = A³ = X, B² = B). The reference calls it the semigroup of the strings
    over a, b without "aa"; with A for a and B for b its table is stricter, "ab" gives X too: the strings that
    avoid X are b*(a|ε). No four elements could do better, as the syntactic monoid of "no aa" has six (ε, a,
    b, ab, ba, aa). We keep the reference's table, because its results (arXiv 2502.07827) were made with it.

    Example:
        >>> aperiodic_monoid().elements
        ('E', 'A', 'B', 'X')
    """
    table = torch.tensor([[0, 1, 2, 3], [1, 3, 3, 3], [2, 1, 2, 3], [3, 3, 3, 3]])
    return FiniteMonoid("M", ("E", "A", "B", "X"), table, identity=0)


def generators(monoid: FiniteMonoid, count: int) -> tuple[int, ...]:
    """The canonical generating subset of a given size, as ids.

    S_n: (2, 1, 3, ...) and the n-cycle (2, ..., n, 1). A_n: the cycle of all points (n odd) or all but 1, and
    (2, 3, 1, 4, ...). Otherwise the first subset that generates, ids in lexicographic order, no identity.

    Args:
        monoid: What to generate.
        count: Size of the subset.

    Raises:
        ValueError: If none of the first 10,000 subsets of that size generates the monoid.

    Example:
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


def parse_group(name: str) -> FiniteMonoid:
    """The monoid that a name stands for, as on a command line.

    Args:
        name: "Z" (cyclic), "S" (symmetric) or "A" (alternating) and a number, "M" (the aperiodic monoid), or
            several joined by "x" (their direct product): "Z2", "S3", "A5", "Z2xZ3", "A5xM".

    Raises:
        ValueError: If the name is none of these.

    Example:
        >>> parse_group("A5xM").order
        240
    """
    check_type("name", name, str)
    families = {"Z": cyclic, "S": symmetric, "A": alternating}
    if not re.fullmatch(r"([ZSA][0-9]+|M)(x([ZSA][0-9]+|M))*", name):
        known = '"Z2", "S3", "A5" (any number), "M" (aperiodic monoid), products as "Z2xZ3" or "A5xM"'
        raise ValueError(f"name must be a group such as {known}, got {name!r}")
    parts = name.split("x")
    return direct_product(*(families[p[0]](int(p[1:])) if p != "M" else aperiodic_monoid() for p in parts))


def _family_generators(monoid: FiniteMonoid) -> list[tuple[int, ...]]:
    n = len(monoid.elements[0]) if isinstance(monoid.elements[0], tuple) else 0
    points = tuple(range(1, n + 1))
    if monoid.name == f"S{n}" and n >= 3:
        return [(monoid.index((2, 1, *points[2:])), monoid.index((*points[1:], 1)))]
    if monoid.name == f"A{n}" and n >= 4:
        still = 1 - n % 2  # a cycle of even length is odd: for even n, leave the point 1 alone
        cycle = (*points[:still], *points[still + 1 :], points[still])
        return [(monoid.index(cycle), monoid.index((2, 3, 1, *points[3:])))]
    return []


def check_ids(name: str, ids: Iterable[int], monoid: FiniteMonoid) -> tuple[int, ...]:
    """The ids of elements as a tuple; anything else is an error."""
    check_type(name, ids, Iterable)
    for element in (known := tuple(ids)):
        check_integer(name, element, 0, monoid.order - 1)
    return known


def _permutation_group(family: str, n: int, *, even_only: bool) -> FiniteMonoid:
    check_integer("n", n, 1, 6)  # the table of S7 would be too large
    points = torch.tensor(list(itertools.permutations(range(n))))
    if even_only:
        inversions = (points[:, :, None] > points[:, None, :]).triu(diagonal=1).sum((1, 2))
        points = points[inversions % 2 == 0]
    # Read as a number in base n, a permutation is its own sorted key: products are found by binary search.
    place = n ** torch.arange(n).flip(0)
    composed = points[:, points]  # [a, b, i] = a(b(i))
    table = torch.searchsorted((points * place).sum(-1), (composed * place).sum(-1))
    return FiniteMonoid(f"{family}{n}", tuple(map(tuple, (points + 1).tolist())), table, identity=0)
