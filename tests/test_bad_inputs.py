"""Every argument of every public call with tensors is named by an error, given a value of a wrong
type, shape or dtype.

The inputs are generated from calls that work. ``python tests/test_bad_inputs.py`` lists the errors
that are not clear.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from test_bad_values import NEITHER, Met, arguments, assert_clear, bad_values, met, shown, unclear
from torch import Tensor, nn

import deqseq as dq
from deqseq import diagnostics, layers, tasks, training

X = torch.ones(2, 3, 4)
IDS = torch.tensor([[1, 2, 3], [3, 2, 1]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
SOLVE = dq.SolveConfig(stop=dq.Stop(max_steps=4))


def square(z: Tensor, args: Tensor | None = None) -> Tensor:
    return 0.5 * torch.tanh(z)


LINEAR = nn.Linear(4, 4)


def linear(z: Tensor) -> Tensor:
    return 0.1 * LINEAR(z)


def told(_: object) -> None:
    """A callback."""


class Case(NamedTuple):
    """A call that works."""

    name: str
    call: Callable[..., Any]
    arguments: dict[str, Any]


def cases() -> list[Case]:
    """Calls with tensors, and those without the decorator; of the others ``test_bad_values.py`` has
    the annotations.
    """
    torch.manual_seed(0)
    model = dq.ImplicitModel(dq.Affine(4), SOLVE)
    explicit = dq.ExplicitModel(
        dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8, injection=False))
    )
    lm, part = dq.CausalLM(6, model), dq.ExplicitModel(dq.Affine(4))
    depth = dq.RecurrentDepth(part, dq.ImplicitModel(dq.Affine(4)), part)
    wide, evaluation = torch.ones(2, 3, 16), model.evaluate(X)
    solver: dict[str, Any] = {"solver": dq.Anderson(), "stop": dq.Stop()}
    fields = {**solver, "gradient": dq.Phantom(2), "sweep": dq.Simultaneous(), "start": "zero"}
    rest = {"callback": told, "throw": False, "solve": SOLVE, **fields}
    prompt = {"input_ids": IDS, "max_new_tokens": 2}
    sampled = {
        "window": 2,
        "temperature": 1.0,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 0,
        "stop_tokens": (1,),
        "pad_token": 0,
    }
    diagnosed = {"model": lm, "ids": IDS, "mask": MASK, "solve": SOLVE}
    return [
        Case("solve", dq.solve, {"f": square, "z0": X, **solver, "callback": told}),
        Case(
            "solve has_aux",
            dq.solve,
            {"f": lambda z: (square(z), z), "z0": X, **solver, "has_aux": True},
        ),
        Case("fixed_point", dq.fixed_point, {"f": square, "z0": X, **solver, "throw": False}),
        Case(
            "fixed_point gradient", dq.fixed_point, {"f": linear, "z0": X, "gradient": dq.OneStep()}
        ),
        Case("implicit model", model, {"x": X, "mask": MASK, "return_cache": False, **rest}),
        Case("implicit start", model, {"x": X, "start": X}),
        Case("implicit cache", model, {"x": X, "cache": model(X, return_cache=True).cache}),
        Case("evaluate", model.evaluate, {"x": X, "start": X, "iterations": 2}),
        Case("commit", model.commit, {"cache": None, "evaluation": evaluation}),
        Case("recurrent model", depth, {"x": X, "mask": MASK, "return_cache": False, **rest}),
        Case("recurrent cache", depth, {"x": X, "cache": depth(X, return_cache=True).cache}),
        Case("recurrent evaluate", depth.evaluate, {"x": X, "start": X, "iterations": 2}),
        Case("explicit model", explicit, {"x": wide, "mask": MASK, "return_cache": False}),
        Case(
            "explicit cache",
            explicit,
            {"x": wide, "cache": explicit(wide, return_cache=True).cache},
        ),
        Case(
            "lm", lm, {"input_ids": IDS, "labels": IDS, "mask": MASK, "return_cache": False, **rest}
        ),
        Case("lm targets", lm, {"input_ids": IDS, "targets": IDS}),
        Case("generate", lm.generate, {**prompt, "mask": MASK, **sampled, "callback": told}),
        Case("generate solve", lm.generate, {**prompt, "solve": SOLVE, **fields}),
        Case("Curriculum", training.Curriculum, {"phases": (training.free(),), "unit": "fraction"}),
        Case(
            "jacobian_regularisation", training.jacobian_regularisation, {"f": square, "z_star": X}
        ),
        Case(
            "prefix_products",
            tasks.prefix_products,
            {"monoid": tasks.parse_group("Z4"), "tokens": IDS},
        ),
        Case(
            "WordProblem", tasks.WordProblem, {"monoid": tasks.parse_group("Z3"), "inputs": (1, 2)}
        ),
        Case(
            "batches",
            tasks.WordProblem(tasks.parse_group("Z3")).batches,
            {"batch": 2, "length": 3, "seed": 0},
        ),
        Case("with_weights", layers.with_weights, {"module": nn.Linear(2, 2)}),
        Case("dropout_mask", layers.dropout_mask, {"like": X, "p": 0.5}),
        Case("model_spectral_radius", diagnostics.model_spectral_radius, diagnosed),
        Case(
            "spectral_radius",
            diagnostics.spectral_radius,
            {"f": square, "z_star": X, "products": 3},
        ),
        Case(
            "check_duality",
            diagnostics.check_duality,
            {**diagnosed, "sweeps": [dq.Simultaneous(), dq.Sequential()]},
        ),
    ]


FINE: dict[str, set[str]] = {  # what looks wrong, and is taken
    **{
        name: {"torch.float32 (3, 4)", "torch.float64 (2, 3, 4)"} for name in ("z0", "z", "z_star")
    },  # by a map
    "like": {f"torch.float32 {shape}" for shape in ((2, 3, 4), (3, 4), (2, 0, 4), (0, 3, 4))}
    | {"torch.float64 (2, 3, 4)"},
    "stop_tokens": {"3"},
}


def wrong(value: Any, annotation: Any) -> Iterator[Any]:
    """Values that are none of the kind of one that works, and of its annotation."""
    if isinstance(value, Tensor):
        yield from (
            "text",
            3.0,
            value.tolist(),
            value[0],
            value[:, :0],
            value[:0],
            value.to(torch.complex64),
            NEITHER,
        )
        if value.dtype == torch.bool:
            yield from (value.long(), ~value & value, value[:, :1])
        elif value.dtype == torch.int64:
            yield from (value.float(), value.int(), value - 5, value + 1000, value.to("meta"))
        else:
            yield from (value.long(), value.to("meta"), value.double())
    elif isinstance(value, tuple | list):
        yield from (3, "text", NEITHER, [NEITHER], ["text"], [None])
    else:
        yield from bad_values(annotation)


def everything() -> Iterator[Met]:
    for case in cases():
        call = case.call.forward if isinstance(case.call, nn.Module) else case.call
        signature, hints = inspect.signature(call), arguments(call)
        for argument, value in case.arguments.items():
            known = signature.parameters.get(argument)
            for bad in wrong(value, hints.get(argument, Any)):
                if shown(bad) not in FINE.get(argument, ()):
                    yield met(
                        case.name,
                        argument,
                        bad,
                        partial(case.call, **{**case.arguments, argument: bad}),
                    )
            if known is not None and known.default is known.empty:
                others = {name: one for name, one in case.arguments.items() if name != argument}
                yield met(case.name, argument, "missing", partial(case.call, **others))
        yield met(case.name, "misspelt", 1, partial(case.call, **case.arguments, misspelt=1))


@pytest.mark.usefixtures("unchecked")
def test_the_calls_work():
    for case in cases():
        case.call(**case.arguments)


@pytest.mark.usefixtures("unchecked")
def test_bad_inputs_are_named():
    assert_clear(list(everything()), 720)


if __name__ == "__main__":
    print(unclear(list(everything())))
