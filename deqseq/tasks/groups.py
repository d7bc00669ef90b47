"""The groups and monoids that have a name."""

import itertools
import re
from collections.abc import Callable
from typing import Annotated

import torch

from deqseq.annotations import Between, checked
from deqseq.check import suggestion
from deqseq.tasks.monoid import MAX_ORDER, FiniteMonoid, direct_product

LARGEST = {"Z": MAX_ORDER, "D": MAX_ORDER // 2, "S": 6, "A": 6}  # the table of S7 would take 200 MB


@checked
def symmetric(n: Annotated[int, Between(1, LARGEST["S"])]) -> FiniteMonoid:
    """The symmetric group S_n: permutations of 1..n in lexicographic one-line notation; (a ∘ b)(i) = a(b(i)).

    Args:
        n: number of points, 1 to 6; else ValueError.

    Example:
        >>> symmetric(3).elements[:4]
        ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1))
    """
    return _permutation_group("S", n, even_only=False)


@checked
def alternating(n: Annotated[int, Between(1, LARGEST["A"])]) -> FiniteMonoid:
    """The alternating group A_n: the even permutations of :func:`symmetric`. A5 is not solvable.

    Args:
        n: number of points, 1 to 6; else ValueError.

    Example:
        >>> alternating(5).order
        60
    """
    return _permutation_group("A", n, even_only=True)


@checked
def cyclic(n: Annotated[int, Between(1, LARGEST["Z"])]) -> FiniteMonoid:
    """The cyclic group Z_n: 0..n-1 under addition modulo n. Z_2 is parity.

    Args:
        n: number of elements, 1 to 1024; else ValueError.

    Example:
        >>> int(cyclic(5).table[3, 4])
        2
    """
    numbers = torch.arange(n)
    return FiniteMonoid(f"Z{n}", tuple(range(n)), (numbers[:, None] + numbers) % n, identity=0)


@checked
def dihedral(n: Annotated[int, Between(1, LARGEST["D"])]) -> FiniteMonoid:
    r"""The dihedral group D_n of order 2n: rotations r and reflections s of a regular n-gon.

    .. math:: r^n = s^2 = 1, \qquad s \circ r = r^{-1} \circ s

    Its elements are the rotations 1, r, r2, ..., then the reflections s, rs, r2s, ... Some authors name it after its
    order: D5 here is their D10.

    Args:
        n: corners, 1 to 512; else ValueError.

    Example:
        >>> dihedral(5).elements
        ('1', 'r', 'r2', 'r3', 'r4', 's', 'rs', 'r2s', 'r3s', 'r4s')
    """
    rotations = ("1", "r", *(f"r{k}" for k in range(2, n)))[:n]
    flip, turn = torch.arange(2 * n) // n, torch.arange(2 * n) % n
    turned = (turn[:, None] + (1 - 2 * flip[:, None]) * turn) % n  # a reflection turns the next rotation round
    table = turned + n * (flip[:, None] ^ flip)
    reflections = ("s", *(f"{rotation}s" for rotation in rotations[1:]))
    return FiniteMonoid(f"D{n}", rotations + reflections, table, identity=0)


def quaternion() -> FiniteMonoid:
    r"""The quaternion group Q8: the units 1, i, j, k and their negatives.

    .. math:: i^2 = j^2 = k^2 = i \circ j \circ k = -1

    Example:
        >>> quaternion().elements
        ('1', '-1', 'i', '-i', 'j', '-j', 'k', '-k')
    """
    sign, unit = torch.arange(8) % 2, torch.arange(8) // 2
    negative = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]])  # of the product of two units
    signs = sign[:, None] ^ sign ^ negative[unit[:, None], unit]
    labels = ("1", "-1", "i", "-i", "j", "-j", "k", "-k")
    return FiniteMonoid("Q8", labels, 2 * (unit[:, None] ^ unit) + signs, identity=0)


def aperiodic_monoid() -> FiniteMonoid:
    """The aperiodic monoid {E, A, B, X} of the paper's harder word problem, with the table of its code.

    E is the identity, and X absorbs everything. A ∘ A = A ∘ B = X: no letter may follow an A. B ∘ A = A and
    B ∘ B = B: a B before a letter is forgotten. The strings that avoid X are b*(a|ε).

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> aperiodic_monoid().elements
        ('E', 'A', 'B', 'X')
    """
    table = torch.tensor([[0, 1, 2, 3], [1, 3, 3, 3], [2, 1, 2, 3], [3, 3, 3, 3]])
    return FiniteMonoid("M", ("E", "A", "B", "X"), table, identity=0)


FAMILIES: dict[str, Callable[[int], FiniteMonoid]] = {"Z": cyclic, "S": symmetric, "A": alternating, "D": dihedral}
SINGLE: dict[str, Callable[[], FiniteMonoid]] = {"Q8": quaternion, "M": aperiodic_monoid}
PART = rf"([{''.join(FAMILIES)}](?:0|[1-9][0-9]*)|{'|'.join(SINGLE)})"


@checked
def parse_group(name: str) -> FiniteMonoid:
    """The monoid that a name stands for, as on a command line.

    Zn is :func:`cyclic`, Sn :func:`symmetric`, An :func:`alternating`, Dn :func:`dihedral`, Q8 :func:`quaternion` and M
    :func:`aperiodic_monoid`.

    Args:
        name: one of these with a number for n, or several of them joined by "x".

    Raises:
        ValueError: another name; lists the names that there are. Or a number that is too large.

    Example:
        >>> parse_group("A5xM").order
        240
        >>> parse_group("a5 x Q8")
        Traceback (most recent call last):
        ValueError: name must be Zn, Sn, An or Dn with a number for n, Q8, M, or several joined by "x", such as "S3",
        "D5" or "A5xM", got 'a5 x Q8'; did you mean 'A5xQ8'?
    """
    if not re.fullmatch(rf"{PART}(x{PART})*", name):
        families = " or ".join(", ".join(f"{letter}n" for letter in FAMILIES).rsplit(", ", 1))
        known = f'{families} with a number for n, {", ".join(SINGLE)}, or several joined by "x"'
        raise ValueError(f'name must be {known}, such as "S3", "D5" or "A5xM", got {name!r}{_meant(name)}')
    return direct_product(*map(_made, name.split("x")))


def _made(part: str) -> FiniteMonoid:
    try:
        return SINGLE[part]() if part in SINGLE else FAMILIES[part[0]](int(part[1:]))
    except ValueError as error:
        raise ValueError(f"{part}: {error}") from None


def _meant(name: str) -> str:
    """A suggestion, for another way of writing a name or for a name that is close."""
    written = re.sub(r"[\s_()-]", "", name).upper().replace("X", "x").replace("×", "x").replace("*", "x")
    if re.fullmatch(rf"{PART}(x{PART})*", written):
        return f"; did you mean {written!r}?"
    digits = "".join(re.findall(r"\d+", name)[:1]) or "5"
    near = [f"{letter}{digits}" for letter in FAMILIES if int(digits) <= LARGEST[letter]]
    return suggestion(name, [*SINGLE, *near])


def _permutation_group(family: str, n: int, *, even_only: bool) -> FiniteMonoid:
    points = torch.tensor(list(itertools.permutations(range(n))))
    if even_only:
        inversions = (points[:, :, None] > points[:, None, :]).triu(diagonal=1).sum((1, 2))
        points = points[inversions % 2 == 0]
    # Read as a number in base n, a permutation is its own sorted key: products are found by binary search.
    place = n ** torch.arange(n).flip(0)
    composed = points[:, points]  # [a, b, i] = a(b(i))
    table = torch.searchsorted((points * place).sum(-1), (composed * place).sum(-1))
    return FiniteMonoid(f"{family}{n}", tuple(map(tuple, (points + 1).tolist())), table, identity=0)
