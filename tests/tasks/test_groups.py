"""Finite groups and monoids: axioms, known facts, generators, names and error texts."""

import itertools

import pytest
import torch

from deqseq.tasks import FiniteMonoid, WordProblem, direct_product, generators, parse_group

ORDERS = {
    "Z1": 1,
    "Z60": 60,
    "S1": 1,
    "S2": 2,
    "S5": 120,
    "A1": 1,
    "A2": 1,
    "A6": 360,
    "D1": 2,
    "D2": 4,
    "D512": 1024,
    "Q8": 8,
    "Q8xD5": 80,
}


def compose(a, b):
    """The composition of one-line tuples, straight from (a ∘ b)(i) = a(b(i))."""
    return tuple(a[b[i] - 1] for i in range(len(a)))


def product_of(monoid, a, b):
    return monoid.elements[int(monoid.table[monoid.elements.index(a), monoid.elements.index(b)])]


@pytest.mark.parametrize(("name", "order"), list(ORDERS.items()))
def test_every_name_makes_a_group_of_the_known_order(name, order):
    group = parse_group(name)
    assert group.name == name
    assert group.order == order
    assert group.is_group
    ids = torch.arange(order).expand(order, order)
    for dim in (0, 1):  # every column and row of a group's table is a permutation
        assert torch.equal(group.table.sort(dim).values.movedim(dim, 1), ids)


@pytest.mark.parametrize("name", ["S4", "A5"])
def test_permutations_compose_right_to_left(name):
    group = parse_group(name)
    assert group.elements[group.identity] == tuple(range(1, len(group.elements[0]) + 1))
    for a, b in itertools.product(group.elements, repeat=2):
        assert product_of(group, a, b) == compose(a, b)


def test_direct_product_multiplies_factor_by_factor():
    s3 = parse_group("S3")
    m = parse_group("M")
    product = direct_product(s3, m)
    assert product.factors == (s3, m)
    assert product.elements[product.identity] == ((1, 2, 3), "E")
    for (a, x), (b, y) in itertools.product(product.elements, repeat=2):
        assert product_of(product, (a, x), (b, y)) == (compose(a, b), product_of(m, x, y))


def test_direct_products_are_flat():
    z2 = parse_group("Z2")
    z3 = parse_group("Z3")
    m = parse_group("M")
    left = direct_product(direct_product(z2, z3), m)
    right = direct_product(z2, direct_product(z3, m))
    for product in (left, right, parse_group("Z2xZ3xM")):
        assert [factor.name for factor in product.factors] == ["Z2", "Z3", "M"]
        assert product.elements[1 * 12 + 2 * 4 + 3] == (1, 2, "X")
    assert direct_product(z3) is z3


def test_aperiodic_monoid():
    m = parse_group("M")
    products = [product_of(m, a, b) for a, b in itertools.product("EABX", repeat=2)]
    assert "".join(products) == "EABXAXXXBABXXXXX"
    assert not m.is_group


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("Z2", 1, [1]),
        ("Z2xZ3", 1, [(1, 1)]),
        ("S3", 2, [(2, 1, 3), (2, 3, 1)]),
        ("A3", 1, [(2, 3, 1)]),
        ("A4", 2, [(1, 3, 4, 2), (2, 3, 1, 4)]),
        ("A5", 2, [(2, 3, 4, 5, 1), (2, 3, 1, 4, 5)]),
        ("M", 2, ["A", "B"]),
        ("S3", 3, [(1, 3, 2), (2, 1, 3), (2, 3, 1)]),
    ],
)
def test_generators_are_canonical(name, count, expected):
    monoid = parse_group(name)
    assert [monoid.elements[g] for g in generators(monoid, count)] == expected


@pytest.mark.parametrize(("name", "count"), [("A5", 1), ("M", 1), ("Z3", 3)])
def test_generators_that_do_not_exist(name, count):
    with pytest.raises(ValueError, match=f"count must be .* {name} .* got {count}"):
        generators(parse_group(name), count)


@pytest.mark.parametrize("name", ["", "xZ2", "5", "M2", "C7", "Z", "z2", "Z2 x Z3", "Z007"])
def test_an_unknown_name_lists_the_names(name):
    message = rf"name must be Zn, Sn, An or Dn .*Q8, M.*A5xM.*got '{name}'"
    with pytest.raises(ValueError, match=message):
        parse_group(name)


def corners_moved(label, n):
    """How an element of D_n permutes the corners 0..n-1: r rotates them, s reflects them."""
    rotations = 0
    if "r" in label:
        rotations = int(label.strip("rs") or 1)
    sign = -1 if "s" in label else 1
    return tuple((rotations + sign * corner) % n for corner in range(n))


@pytest.mark.parametrize("n", [3, 4, 5, 7])
def test_dihedral_group_moves_the_corners_of_a_polygon(n):
    group = parse_group(f"D{n}")
    moves = {label: corners_moved(label, n) for label in group.elements}
    assert len(set(moves.values())) == group.order == 2 * n
    for a, b in itertools.product(group.elements, repeat=2):
        assert moves[product_of(group, a, b)] == tuple(moves[a][corner] for corner in moves[b])


def test_quaternions_multiply_as_their_matrices():
    one = torch.eye(2) + 0j
    i = torch.tensor([[1j, 0], [0, -1j]])
    j = torch.tensor([[0j, 1], [-1, 0]])
    units = {"1": one, "i": i, "j": j, "k": i @ j}
    matrices = units | {f"-{name}": -matrix for name, matrix in units.items()}
    group = parse_group("Q8")
    assert set(group.elements) == matrices.keys()
    for a, b in itertools.product(group.elements, repeat=2):
        assert torch.equal(matrices[product_of(group, a, b)], matrices[a] @ matrices[b])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: parse_group("Z2xA7"), r"A7: n must .* 1\.\.6, got 7"),
        (lambda: parse_group("Z1025"), r"n must .* 1\.\.1024, got 1025"),
        (lambda: parse_group("A5xA5"), r"order of A5xA5 must .* 1\.\.1024, got 3600"),
        (lambda: direct_product(), "at least one factor"),
        (lambda: parse_group("D0"), r"n must .* 1\.\.512, got 0"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


XOR = [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("labels", "table", "identity", "message"),
    [
        ("aa", XOR, 0, "elements must be distinct and at least one"),
        ("abc", XOR, 0, r"table must be torch.int64 \(3, 3\), got torch.int64 \(2, 2\)"),
        ("ab", [[0, 1], [1, 2]], 0, "table must hold ids 0 to 1, got 0 to 2"),
        ("ab", [[0, 1], [1, -1]], 0, "table must hold ids 0 to 1, got -1 to 1"),
        ("ab", [[0, 0], [1, 1]], 0, "the element with id 0 is not the identity"),
        ("ab", XOR, 2, "the element with id 2 is not the identity"),
    ],
)
def test_a_table_of_another_structure_is_refused(labels, table, identity, message):
    with pytest.raises(ValueError, match=message):
        FiniteMonoid("bad", tuple(labels), torch.tensor(table), identity)


def test_the_table_is_a_copy():
    xor = FiniteMonoid("two", (0, 1), table := torch.tensor(XOR), identity=0)
    table[1, 1] = 1
    assert xor.table[1, 1] == 0


def test_everything_is_on_the_cpu_whatever_the_default_device():
    def batch():
        return next(WordProblem(parse_group("A5xM"), (1, 2)).batches(3, (5, 9), seed=0))

    with torch.device("meta"):
        actual = batch()
    for ours, expected in zip(actual, batch(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.usefixtures("unchecked")
def test_products_that_are_not_associative_and_labels_that_cannot_be_compared_are_refused():
    """Of three elements with an identity, b b = a and a b = b a = a a = b."""
    table = torch.tensor([[0, 1, 2], [1, 2, 2], [2, 2, 1]])
    with pytest.raises(ValueError, match="table must be associative"):
        FiniteMonoid("odd", ("e", "a", "b"), table, 0)
    with pytest.raises(TypeError, match="elements must be hashable labels"):
        FiniteMonoid("list", (["e"],), torch.tensor([[0]]), 0)
