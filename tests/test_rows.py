"""Rows of nested records: taken, put back, mapped."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deqseq.rows import check_rows, map_tensors, put, take, tensors_of

BATCH = 4


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    x: Any
    rest: Any = None
    steps: int = 3


@dataclass(frozen=True)
class Shared:
    """A record with a tensor that all rows share."""

    x: Tensor
    table: Tensor

    def take_rows(self, rows: Tensor) -> "Shared":
        return Shared(self.x[rows], self.table)


class Stack(list):
    """A list of one's own."""


def numbers(start: int = 0, width: int = 2) -> Tensor:
    return torch.arange(start, start + BATCH * width).reshape(BATCH, width)


def nested(start: int = 0) -> Record:
    """Every kind of record inside another."""
    a, b, c, d = (numbers(start + 100 * i) for i in range(4))
    return Record(
        Pair(a, (None, [b, 7])),
        {"c": Record(c, "text"), "none": None, "more": [(), {}, Pair(d, 0.5)]},
    )


@pytest.mark.parametrize("rows", [[2], [3, 0], [1, 1, 0, 3, 2], []], ids=str)
def test_takes_rows_of_every_tensor_in_any_order(rows):
    rows, whole = torch.tensor(rows, dtype=torch.int64), nested()
    taken = take(whole, rows)
    a, b, c, d = (numbers(100 * i)[rows] for i in range(4))
    assert type(taken) is Record and taken.steps == 3
    assert type(taken.x) is Pair and torch.equal(taken.x.left, a)
    assert type(taken.x.right) is tuple and taken.x.right[0] is None
    assert (
        type(taken.x.right[1]) is list
        and torch.equal(taken.x.right[1][0], b)
        and taken.x.right[1][1] == 7
    )
    assert list(taken.rest) == ["c", "none", "more"] and taken.rest["none"] is None
    assert (
        type(taken.rest["c"]) is Record
        and torch.equal(taken.rest["c"].x, c)
        and taken.rest["c"].rest == "text"
    )
    assert taken.rest["more"][:2] == [(), {}]
    assert torch.equal(taken.rest["more"][2].left, d) and taken.rest["more"][2].right == 0.5


@pytest.mark.parametrize("alone", [None, 3, 2.5, "text", (), {}, []], ids=repr)
def test_what_has_no_tensor_stays_as_it_is(alone):
    assert take(alone, torch.tensor([1])) == alone
    assert put(alone, torch.tensor([1]), alone) == alone
    assert map_tensors(torch.neg, alone) == alone
    assert tensors_of(alone) == ()


@pytest.mark.parametrize(
    "rows", [3, [0, 1], torch.tensor([0.5]), torch.ones(4, dtype=torch.bool)], ids=str
)
@pytest.mark.usefixtures("unchecked")
def test_rows_that_are_not_positions_are_named(rows):
    with pytest.raises(TypeError, match="rows must be positions in an int64 tensor"):
        take(numbers(), rows)


def test_a_record_may_take_its_rows_by_itself():
    shared = Shared(numbers(), torch.ones(7, 2))
    taken = take((Record(shared), shared), torch.tensor([3, 1]))
    assert type(taken[0].x) is Shared
    for one in (taken[0].x, taken[1]):
        assert one.x.tolist() == numbers()[[3, 1]].tolist()
        assert one.table is shared.table


def test_put_replaces_rows_and_changes_nothing_in_place():
    rows, whole, other = torch.tensor([3, 1]), nested(), take(nested(1000), torch.tensor([0, 2]))
    result = put(whole, rows, other)
    for old, original, new, part in zip(
        *map(tensors_of, (whole, nested(), result, other)), strict=True
    ):
        assert torch.equal(old, original)
        assert torch.equal(new[rows], part)
        assert torch.equal(new[[0, 2]], original[[0, 2]])
    assert (
        type(result.x) is Pair and result.rest["c"].rest == "text" and result.rest["none"] is None
    )


def test_put_undoes_take_and_carries_gradients():
    x, rows = torch.randn(BATCH, 3, dtype=torch.float64, requires_grad=True), torch.tensor([2, 0])
    again = put((x, None), rows, take((x, None), rows))[0]
    assert torch.equal(again, x)
    weights = torch.arange(BATCH * 3).reshape(BATCH, 3).double()
    assert torch.equal(torch.autograd.grad((again * weights).sum(), x)[0], weights)


def test_put_refuses_another_structure():
    with pytest.raises(ValueError, match="zip"):
        put((numbers(), numbers()), torch.tensor([0]), (numbers()[:1],))


def test_map_tensors_reaches_every_tensor_once_and_keeps_the_structure():
    whole = nested()
    doubled = map_tensors(lambda x: 2 * x, whole)
    assert [x.tolist() for x in tensors_of(doubled)] == [
        (2 * x).tolist() for x in tensors_of(whole)
    ]
    assert len(tensors_of(whole)) == 4
    assert type(doubled.x) is Pair and doubled.rest["more"][2].right == 0.5
    for record in (OrderedDict(b=numbers(), a=None), Stack([numbers(), None])):
        assert map_tensors(lambda x: x, record) == record and type(
            map_tensors(torch.neg, record)
        ) is type(record)
        assert len(tensors_of(take(record, torch.tensor([1])))[0]) == 1


def test_records_keep_what_their_constructor_does_not_take():
    @dataclass(frozen=True)
    class Doubled:
        x: torch.Tensor
        twice: torch.Tensor = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "twice", 2 * self.x)

    rows, whole = torch.tensor([2, 0]), defaultdict(list, a=Doubled(torch.arange(3)))
    taken = take(whole, rows)
    assert taken["a"].twice.tolist() == [4, 0] and taken["new"] == []
    assert list(whole) == ["a"]
    assert put(whole, rows[:1], take(whole, rows[1:]))["a"].twice.tolist() == [0, 2, 0]


def test_a_function_with_tensors_of_its_own_is_no_record():
    """Its tensors would not be cut: rows would meet those of others."""

    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return self.scale * x

    check_rows("args", (torch.cos, Scaled(2.0)), BATCH)
    with pytest.raises(TypeError, match=r"args must be tensors, .*take_rows.* got a Scaled"):
        check_rows("args", (torch.cos, Scaled(numbers())), BATCH)
