"""Multiplication tables of finite monoids: products, generated elements, axioms."""

from collections.abc import Hashable, Iterable

import torch
from jaxtyping import Int64
from torch import Tensor


def product_table(tables: tuple[Tensor, ...]) -> Int64[Tensor, "order order"]:
    """The table of the direct product."""
    table = tables[0]
    for factor in tables[1:]:  # the id of (a, b) is a * order + b
        table = torch.kron(table * len(factor), torch.ones_like(factor)) + factor.repeat(table.shape)
    return table


def reached(table: Tensor, identity: int, subset: Iterable[int]) -> Tensor:
    """Mask of the elements that the products ((a ∘ b) ∘ c) ∘ ... of elements of `subset` reach."""
    mask = torch.zeros(len(table), dtype=torch.bool)
    steps, frontier = table[:, list(subset)], torch.tensor([identity])
    while len(frontier):
        mask[frontier] = True
        following = steps[frontier].flatten()
        frontier = following[~mask[following]].unique()  # or repeats multiply, round after round
    return mask


def table_from_steps(steps: Int64[Tensor, "order generators"]) -> Int64[Tensor, "order order"]:
    """The table of a monoid that was explored from its identity, 0: ``steps[a, g]`` is a ∘ generator g.

    Every element but the identity must be reached first from one with a smaller id.
    """
    order = len(steps)
    table = torch.arange(order)[:, None].repeat(1, order)
    for element in range(1, order):  # it is shorter ∘ generator, and a ∘ element = (a ∘ shorter) ∘ generator
        shorter, generator = (steps == element).nonzero()[0].tolist()
        table[:, element] = steps[table[:, shorter], generator]
    return table


def check_table(name: str, labels: tuple[Hashable, ...], table: Tensor, identity: int) -> None:
    """Raise a ValueError unless the table is that of a monoid with these elements."""
    order = len(labels)
    if order == 0 or len(set(labels)) != order:
        raise ValueError(f"{name}: elements must be distinct and at least one, got {labels!r}.")
    if table.shape != (order, order) or table.dtype != torch.int64:
        got = f"{table.dtype} {tuple(table.shape)}"
        raise ValueError(f"{name}: table must be torch.int64 {(order, order)}, got {got}.")
    if table.min() < 0 or table.max() >= order:
        raise ValueError(f"{name}: table must hold ids 0 to {order - 1}, got {table.min()} to {table.max()}.")
    both_sides = torch.stack([table[identity % order], table[:, identity % order]])
    if not 0 <= identity < order or not (both_sides == torch.arange(order)).all():
        raise ValueError(f"{name}: the element with id {identity} is not the identity.")
    # Light's test: in a table that `probes` generate, associativity with a probe in the middle is enough.
    probes: list[int] = []
    while not (known := reached(table, identity, probes)).all():
        probes.append(int((~known).nonzero()[0]))
    for middle in probes:
        wrong = (table[table[:, middle]] != table[:, table[middle]]).nonzero().tolist()
        if wrong:
            a, b, c = labels[wrong[0][0]], labels[middle], labels[wrong[0][1]]
            raise ValueError(f"{name} is not associative: ({a} ∘ {b}) ∘ {c} != {a} ∘ ({b} ∘ {c}).")
