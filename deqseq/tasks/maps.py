"""Generators of monoids: maps of points in one-line notation, and square matrices."""

from deqseq.check import check_integer, check_type

Map = tuple  # of n integers in 1..n, or of n rows of n integers


def is_matrix(element: Map) -> bool:
    """Whether an element has rows."""
    return isinstance(element[0], tuple)


def composed(a: Map, b: Map, modulus: int | None) -> Map:
    """The composition a ∘ b, b first; for matrices their product."""
    if not is_matrix(a):
        return tuple(a[point - 1] for point in b)
    columns = tuple(zip(*b, strict=True))
    rows = ([sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a)
    return tuple(_reduced(row, modulus) for row in rows)


def read_generators(generators: tuple[Map, ...], modulus: int | None) -> tuple[list[Map], Map]:
    """The generators, their entries reduced, and the identity; an error unless they compose with each other."""
    if not generators:
        raise ValueError("generators must be at least one permutation or matrix, got none")
    for generator in generators:
        check_type("generators", generator, tuple, "(2, 1, 3)")
        _check(generator, len(generators[0]), isinstance(next(iter(generators[0]), 0), tuple))
    size = len(generators[0])
    if not is_matrix(generators[0]):
        if modulus is not None:
            raise ValueError(f"modulus must be None for maps in one-line notation, got {modulus}")
        return list(generators), tuple(range(1, size + 1))
    if modulus is not None:
        check_integer("modulus", modulus, 2)
    identity = tuple(tuple(int(i == j) for j in range(size)) for i in range(size))
    return [tuple(_reduced(row, modulus) for row in generator) for generator in generators], identity


def _check(generator: Map, size: int, matrix: bool) -> None:
    if len(generator) != size or size == 0:
        raise ValueError(f"generators must be of one size, at least 1, got sizes {size} and {len(generator)}")
    for part in generator:
        if not matrix:
            check_integer(f"generators (a map of 1..{size})", part, 1, size)
            continue
        check_type("generators (a row of a matrix)", part, tuple, "(0, 1)")
        if len(part) != size:
            raise ValueError(f"generators must be square matrices, got a row of {len(part)} numbers among {size} rows")
        for number in part:
            check_integer("generators (an entry of a matrix)", number, -(2**62), 2**62)


def _reduced(row: list[int] | tuple[int, ...], modulus: int | None) -> tuple[int, ...]:
    return tuple(int(number) if modulus is None else int(number) % modulus for number in row)
