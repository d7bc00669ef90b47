"""Rows of nested records: taken, put back, mapped.

Records of integers are compared as text, which shows types, structure and numbers.
"""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deqseq.rows import check_rows, map_tensors, put, take, tensors_of

NUMBERS = torch.arange(8).reshape(4, 2)


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

    def take_rows(self, rows):
        return Shared(self.x[rows], self.table)


class Stack(list):
    """A list of one's own."""


def nested(change=lambda x: x):
    """Every kind of record inside another, with four changed tensors."""
    a, b, c, d = (change(NUMBERS + 100 * i) for i in range(4))
    rest = {"c": Record(c, "text"), "none": None, "more": [(), {}, Pair(d, 0.5)]}
    return Record(Pair(a, (None, [b, 7])), rest)


@pytest.mark.parametrize("rows", [[2], [1, 1, 0, 3, 2], []])
def test_takes_rows_of_every_tensor_in_any_order(rows):
    rows = torch.tensor(rows, dtype=torch.int64)
    assert str(take(nested(), rows)) == str(nested(lambda x: x[rows]))


@pytest.mark.parametrize("value", [None, 3, 2.5, "text", (), {}, []])
def test_what_has_no_tensor_stays_as_it_is(value):
    rows = torch.tensor([1])
    assert take(value, rows) == put(value, rows, value) == map_tensors(torch.neg, value) == value
    assert tensors_of(value) == ()


@pytest.mark.parametrize("rows", [3, [0, 1], torch.tensor([0.5]), torch.ones(4, dtype=torch.bool)])
@pytest.mark.usefixtures("unchecked")
def test_rows_that_are_not_positions_are_named(rows):
    with pytest.raises(TypeError, match="rows must be positions in an int64 tensor"):
        take(NUMBERS, rows)


def test_a_record_may_take_its_rows_by_itself():
    shared = Shared(NUMBERS, torch.ones(7, 2))
    record, taken = take((Record(shared), shared), torch.tensor([3, 1]))
    for each in (record.x, taken):
        assert type(each) is Shared
        assert torch.equal(each.x, NUMBERS[[3, 1]])
        assert each.table is shared.table


def test_put_replaces_rows_and_changes_nothing_in_place():
    rows = torch.tensor([3, 1])
    whole = nested()
    others = torch.tensor([0, 2])
    replaced = put(whole, rows, take(nested(torch.neg), others))
    assert str(whole) == str(nested())
    assert str(replaced) == str(nested(lambda x: torch.stack((x[0], -x[2], x[2], -x[0]))))


def test_put_undoes_take_and_carries_gradients():
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([2, 0])
    result, _ = put((x, None), rows, take((x, None), rows))
    assert torch.equal(result, x)
    weights = NUMBERS.double()
    assert torch.equal(torch.autograd.grad((result * weights).sum(), x)[0], weights)


def test_put_refuses_another_structure():
    with pytest.raises(ValueError, match="zip"):
        put((NUMBERS, NUMBERS), torch.tensor([0]), (NUMBERS[:1],))


def test_map_tensors_reaches_every_tensor_once_and_keeps_the_structure():
    assert str(map_tensors(lambda x: 2 * x, nested())) == str(nested(lambda x: 2 * x))
    assert len(tensors_of(nested())) == 4


@pytest.mark.parametrize("record", [OrderedDict(b=NUMBERS, a=None), Stack([NUMBERS, None])])
def test_subclasses_of_dictionaries_and_lists_are_kept(record):
    taken = take(record, torch.tensor([1]))
    assert type(taken) is type(record)
    assert torch.equal(*tensors_of(taken), NUMBERS[[1]])


def test_records_keep_what_their_constructor_does_not_take():
    @dataclass(frozen=True)
    class Doubled:
        x: torch.Tensor
        twice: torch.Tensor = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "twice", 2 * self.x)

    rows = torch.tensor([2, 0])
    whole = defaultdict(list, a=Doubled(torch.arange(3)))
    taken = take(whole, rows)
    assert taken["a"].twice.tolist() == [4, 0]
    assert taken["new"] == []
    assert list(whole) == ["a"]
    assert put(whole, rows[:1], take(whole, rows[1:]))["a"].twice.tolist() == [0, 2, 0]


def test_a_function_with_tensors_of_its_own_is_not_a_record():
    """Its tensors would not be cut: rows would meet those of others."""

    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return self.scale * x

    check_rows("args", (torch.cos, Scaled(2.0)), 4)
    with pytest.raises(TypeError, match=r"args must be tensors, .*take_rows.* got a Scaled"):
        check_rows("args", (torch.cos, Scaled(NUMBERS)), 4)
