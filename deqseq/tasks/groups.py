"""The groups and monoids that have a name."""

import itertools
import re
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import check_integer, checked
from deqseq.tasks.monoid import MAX_ORDER, FiniteMonoid, Label, direct_product

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
      512: order 2n, with :math:`r^n = s^2 = 1` and :math:`s \circ r = r^{-1} \circ s`. Some authors
      name it after its order.
    - ``Q8``: the quaternions 1, -1, i, -i, ..., with :math:`i^2 = j^2 = k^2 = i \circ j \circ k =
      -1`.
    - ``M``: the aperiodic monoid {E, A, B, X} of the paper's harder word problem. E is the
      identity, X absorbs everything; A ∘ A = A ∘ B = X, B ∘ A = A, B ∘ B = B.

    Args:
        name: one of these with a number for n, or several of them joined by "x".

    Raises:
        ValueError: another name, or a number that is too large.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
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
