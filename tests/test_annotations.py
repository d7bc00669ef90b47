"""What annotations say of arguments, read by ``checked``: the refusals, and what is taken."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
import torch
from torch import nn

import deqseq as dq
from deqseq.arguments import Between, Within, checked
from deqseq.types import Sequence

pytestmark = pytest.mark.usefixtures("unchecked")


@checked
def call(
    count: Annotated[int, Between(1)] = 1,
    few: Annotated[int, Between(0, 9)] | None = None,
    share: Annotated[float, Within("[0, 1)")] = 0.0,
    open_end: Annotated[float, Within("(0, inf]")] = 1.0,
    flag: bool = False,
    norm: Literal["token", "row"] = "token",
    start: Literal["zero"] | dq.RandomStart = "zero",
    solver: dq.Solver[Any] = dq.Anderson(),
    stop: dq.Stop | None = None,
    model: nn.Module | str = "name",
    x: Sequence | None = None,
    function: Callable[..., Any] | None = None,
    callback: Callable[[int], None] | None = None,
    later: "Later | None" = None,
    anything: Any = None,
    number: int | float = 0,
    mixed: Annotated[int, Between(1)] | tuple[int, ...] = 1,
    one_or_two: Literal[1, 2] = 1,
    *rest: Annotated[int, Between(0)],
    keyword: bool = True,
) -> str:
    return "called"


@dataclass(frozen=True)
class Later:
    """A class that an annotation names before it is there."""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "an integer >= 1, got 0"),
        ("count", 1.0, "an integer >= 1, got 1.0"),
        ("count", True, "an integer >= 1, got True"),
        ("few", 10, "an integer in 0..9, got 10"),
        ("share", 1, "a number in [0, 1), got 1"),
        ("share", math.nan, "a number in [0, 1), got nan"),
        ("share", Fraction(1, 2), "a number in [0, 1), got Fraction(1, 2)"),  # torch takes none
        ("share", "0.5", "a number in [0, 1), got '0.5'"),
        ("open_end", 0, "a number in (0, inf], got 0"),
        ("flag", 1, "True or False, got 1"),
        ("norm", "tokens", "one of ('token', 'row'), got 'tokens'; did you mean 'token'?"),
        (
            "start",
            "random",
            "one of ('zero',) or a RandomStart, got 'random': write RandomStart(...)",
        ),
        ("solver", "anderson", "a Solver, got 'anderson': write Anderson(...)"),
        ("solver", dq.Broyden, "a Solver, got <class 'deqseq.solvers.broyden.Broyden'>: write Br"),
        ("start", 0.5, "one of ('zero',) or a RandomStart, got 0.5: write RandomStart(0.5)"),
        ("solver", "picard", "a Solver, got 'picard' (there are Adaptive, Anderson, Broyden, "),
        ("stop", 1e-3, "a Stop or None, got 0.001: write Stop(0.001)"),
        ("model", 3, "a Module or a string, got 3"),
        ("x", [1.0], "a Tensor or None, got [1.0]"),
        ("function", "relu", "a function or None, got 'relu'"),
        ("function", nn.Linear, "a function or None, got <class"),
        ("callback", "print", "a function of 1 argument(s) or None, got 'print'"),
        ("callback", lambda: None, "a function of 1 argument(s) or None, got <lambda>()"),
        ("callback", lambda a, b: None, "a function of 1 argument(s) or None, got <lambda>(a, b)"),
        ("later", 3, "a Later or None, got 3"),
        ("later", 3.0, "a Later or None, got 3.0"),
        ("number", "3", "an integer or a number in (-inf, inf), got '3'"),
        ("number", True, "an integer or a number in (-inf, inf), got True"),
        ("number", math.nan, "an integer or a number in (-inf, inf), got nan"),
        ("mixed", 0, "an integer >= 1 or a tuple, got 0"),
        ("mixed", "3", "an integer >= 1 or a tuple, got '3'"),
        ("one_or_two", 1.0, "one of (1, 2), got 1.0"),
        ("keyword", "no", "True or False, got 'no'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_wanted(name, value, message):
    with pytest.raises((TypeError, ValueError)) as error:
        call(**{name: value})
    assert str(error.value).startswith(f"{name} must be {message}")


def test_too_many_arguments_by_place_are_named():
    with pytest.raises(TypeError, match=r"^Stop takes 1 positional argument\(s\) \(rtol\), g"):
        dq.Stop(1e-3, 64)
    with pytest.raises(
        TypeError,
        match=r"argument\(s\) \(f, z0\), got 3: give the others by name \(args,",
    ):
        dq.fixed_point(torch.cos, torch.zeros(1, 1), torch.zeros(1, 1))


def test_values_of_the_kind_are_taken():
    assert call() == "called"
    assert (
        call(
            np.int64(3), 9, np.float32(0.5), math.inf, True, "row", dq.RandomStart(0.5), dq.Naive()
        )
        == "called"
    )
    assert (
        call(
            stop=dq.Stop(),
            model=nn.Identity(),
            x=torch.ones(1, 1, 1),
            function=torch.cos,
            later=Later(),
        )
        == "called"
    )
    assert (
        call(few=None, stop=None, x=None, function=None, anything=object(), number=1.5) == "called"
    )
    assert (
        call(norm=np.str_("row"), number=np.int64(1), mixed=np.int64(2))
        == call(mixed=(0, 0))
        == "called"
    )


def test_further_arguments_are_checked_one_by_one():
    parameters = inspect.signature(call).parameters.values()
    defaults = [one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert call(*defaults, 1, 2) == "called"
    with pytest.raises(ValueError, match=r"^rest must be an integer >= 0, got -1"):
        call(*defaults, 1, -1)


def test_a_constructor_names_its_class():
    class Layer:
        @checked
        def __init__(self, width: Annotated[int, Between(1)]) -> None:
            self.width = width

    assert Layer(2).width == 2
    with pytest.raises(ValueError, match=r"Layer\.width must be an integer >= 1, got 0"):
        Layer(0)


class Fields(TypedDict, total=False):
    window: Annotated[int, Between(1)]


@checked
def with_fields(
    mask: Any = None, solve: dq.SolveConfig | None = None, **fields: Unpack[Fields]
) -> str:
    return "called"


@pytest.mark.parametrize(
    ("function", "name", "message"),
    [
        (
            call,
            "counts",
            "unknown argument 'counts'; did you mean 'count'? (call takes: count, few, ",
        ),
        (call, "tol", "unknown argument 'tol': write stop=Stop(rtol=...) (call takes: "),
        (
            with_fields,
            "max_iter",
            "unknown argument 'max_iter': write solve=SolveConfig(stop=Stop(max_steps=...))",
        ),
        (
            with_fields,
            "iterations",
            "unknown argument 'iterations': write solve=SolveConfig(stop=Stop.exactly(...))",
        ),
        (with_fields, "attention_mask", "unknown argument 'attention_mask'; did you mean 'mask'? "),
        (
            with_fields,
            "solver",
            "unknown argument 'solver': write solve=SolveConfig(solver=...)",
        ),
        (
            with_fields,
            "windows",
            "unknown argument 'windows'; did you mean 'window'? (with_fields takes: mask, ",
        ),
        (
            dq.Stop.exactly,
            "stepss",
            "unknown argument 'stepss'; did you mean 'steps'? (Stop.exactly takes: steps)",
        ),
        (
            dq.Mamba2,
            "d_model",
            "unknown argument 'd_model': write config=Mamba2Config(d_model=...)",
        ),
        (
            dq.Stop,
            "max_iter",
            "unknown argument 'max_iter'; did you mean 'max_steps'? (Stop takes: rtol, ",
        ),
    ],
)
def test_an_unknown_argument_is_answered_with_what_may_be_meant(function, name, message):
    with pytest.raises(TypeError) as error:
        function(**{name: 3})
    assert str(error.value).startswith(message)


def test_fields_of_a_record_are_checked_as_arguments_are():
    assert with_fields(window=2) == "called"
    with pytest.raises(ValueError, match="window must be an integer >= 1, got 0"):
        with_fields(window=0)


@pytest.mark.parametrize("annotation", [int | None, list[int], Callable[..., Any]])
def test_keywords_that_are_not_fields_of_a_record_are_taken_by_any_name(annotation):
    @checked
    def named(**options: annotation) -> int:
        return len(options)

    assert (
        named(a=None if annotation == int | None else [1] if annotation == list[int] else len) == 1
    )
    with pytest.raises(TypeError, match=r"^b must be "):
        named(b="text")


def test_a_local_class_in_a_string_is_not_checked():
    class Local:
        pass

    @checked
    def taken(fields: Fields | None = None, own: "Local | None" = None) -> str:
        return "called"

    assert taken(fields={"window": 0}, own=3) == "called"


def test_nothing_is_checked_inside_compiled_code():
    @checked
    def scaled(x: torch.Tensor, factor: Annotated[float, Within("[0, 1]")]) -> torch.Tensor:
        return x * factor

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2), 2.0).tolist() == [2, 2]
    with pytest.raises(ValueError, match="factor"):
        scaled(torch.ones(2), 2.0)
