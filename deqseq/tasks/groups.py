"""Finite monoids as multiplication tables, and those that have a name."""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import NonNegativeInt, PositiveInt, check_integer, checked

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
        >>> import torch
        >>> from deqseq.tasks import FiniteMonoid
        >>> minimum = FiniteMonoid(
        ...     "min", ("low", "high"), torch.tensor([[0, 0], [0, 1]]), identity=1
        ... )
        >>> minimum.order, minimum.is_group
        (2, False)
    """

    name: str
    elements: tuple[Label, ...] = field(repr=False)
    table: Int64[Tensor, "order order"] = field(repr=False)
    identity: NonNegativeInt
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
        >>> from deqseq.tasks import direct_product
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
def generators(monoid: FiniteMonoid, count: PositiveInt) -> tuple[int, ...]:
    """A fixed choice of ``count`` elements that generate the monoid, as ids.

    Two for S_n: (2, 1, 3, ...) and the n-cycle (2, ..., n, 1). Two for A_n: the cycle of all points
    (n odd) or all but 1, and (2, 3, 1, 4, ...). Otherwise the first subset without the identity
    that generates, in lexicographic order of the ids.

    Args:
        monoid: the monoid to generate.
        count: size of the subset.

    Raises:
        ValueError: none of the first 10,000 subsets of that size generates the monoid.

    Example:
        >>> from deqseq.tasks import generators
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


Elements = tuple[tuple[Label, ...], Int64[Tensor, "order order"]]
"""Labels, the identity first, and the ids of their products."""


def _cyclic(n: int) -> Elements:
    numbers = torch.arange(n)
    return tuple(range(n)), (numbers[:, None] + numbers) % n


def _dihedral(n: int) -> Elements:
    rotations = ("1", "r", *(f"r{k}" for k in range(2, n)))[:n]
    reflections = ("s", *(f"{rotation}s" for rotation in rotations[1:]))
    flip, turn = torch.arange(2 * n) // n, torch.arange(2 * n) % n
    sign = 1 - 2 * flip[:, None]  # a reflection reverses the rotation that follows
    turns = (turn[:, None] + sign * turn) % n
    return rotations + reflections, turns + n * (flip[:, None] ^ flip)


def _permutations(n: int, *, even: bool = False) -> Elements:
    """All permutations, or the ``even`` ones."""
    points = torch.tensor(list(itertools.permutations(range(n))))
    if even:
        inversions = (points[:, :, None] > points[:, None, :]).triu(diagonal=1).sum((1, 2))
        points = points[inversions % 2 == 0]
    composed = points[:, points]  # [a, b, i] = a(b(i))
    # The digits of a number in base n. The rows are sorted, so a binary search finds products.
    places = n ** torch.arange(n).flip(0)
    table = torch.searchsorted((points * places).sum(-1), (composed * places).sum(-1))
    labels = (points + 1).tolist()
    return tuple(map(tuple, labels)), table


def _quaternion() -> Elements:
    sign, unit = torch.arange(8) % 2, torch.arange(8) // 2
    # whether the product of two units of 1, i, j, k is negative
    negative = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]])
    signs = sign[:, None] ^ sign ^ negative[unit[:, None], unit]
    units = unit[:, None] ^ unit
    return ("1", "-1", "i", "-i", "j", "-j", "k", "-k"), 2 * units + signs


def _aperiodic() -> Elements:
    table = torch.tensor([[0, 1, 2, 3], [1, 3, 3, 3], [2, 1, 2, 3], [3, 3, 3, 3]])
    return ("E", "A", "B", "X"), table


FAMILIES: dict[str, tuple[Callable[[int], Elements], int]] = {
    "Z": (_cyclic, MAX_ORDER),
    "S": (_permutations, 6),  # the table of S7 would take 200 MB
    "A": (partial(_permutations, even=True), 6),
    "D": (_dihedral, MAX_ORDER // 2),
}
"""Groups with a number n in their name, and the largest n."""
SINGLE: dict[str, Callable[[], Elements]] = {"Q8": _quaternion, "M": _aperiodic}
PART = rf"([{''.join(FAMILIES)}](?:0|[1-9][0-9]*)|{'|'.join(SINGLE)})"


@checked
def parse_group(name: str) -> FiniteMonoid:
    r"""The group or monoid that a name stands for, as on a command line.

    - ``Zn``: 0..n-1 under addition modulo n, n up to 1024. Z2 is parity.
    - ``Sn``: permutations of 1..n in lexicographic one-line notation, n up to 6; (a ∘ b)(i) =
      a(b(i)).
    - ``An``: the even permutations of Sn. A5 is the smallest group that is not solvable.
    - ``Dn``: rotations 1, r, r2, ... and reflections s, rs, r2s, ... of a regular n-gon, n up to
      512: order 2n, with :math:`r^n = s^2 = 1` and :math:`s \circ r = r^{-1} \circ s`.
    - ``Q8``: the quaternions 1, -1, i, -i, ..., with :math:`i^2 = j^2 = k^2 = i \circ j \circ k =
      -1`.
    - ``M``: the aperiodic monoid {E, A, B, X} of the paper's harder word problem. E is the
      identity, X absorbs everything; A ∘ A = A ∘ B = X, B ∘ A = A, B ∘ B = B.

    Args:
        name: one of these with a number for n, or several of them joined by "x".

    Raises:
        ValueError: another name, a number out of its range, or a product of more than 1,024
            elements.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> from deqseq.tasks import parse_group
        >>> parse_group("A5xM").order
        240
        >>> parse_group("D3").elements
        ('1', 'r', 'r2', 's', 'rs', 'r2s')
    """
    if not re.fullmatch(rf"{PART}(x{PART})*", name):
        raise ValueError(
            "name must be Zn, Sn, An or Dn with a number for n, Q8, M, or several joined by "
            f'"x", such as "S3", "D5" or "A5xM", got {name!r}'
        )
    with torch.device("cpu"):  # whatever the default device is
        return direct_product(*map(_factor, name.split("x")))


def _factor(name: str) -> FiniteMonoid:
    if name in SINGLE:
        elements, table = SINGLE[name]()
    else:
        make, largest = FAMILIES[name[0]]
        n = int(name[1:])
        check_integer(f"{name}: n", n, 1, largest)
        elements, table = make(n)
    return FiniteMonoid(name, elements, table, identity=0)
