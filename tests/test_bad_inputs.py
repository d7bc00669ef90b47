"""Every argument of every public call with tensors is named by an error, given a value of a wrong type, shape or dtype.

The inputs are generated from calls that work. ``python tests/test_bad_inputs.py`` lists the errors that are not clear.
"""

import inspect
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
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
    torch.manual_seed(0)
    model = dq.ImplicitModel(dq.Affine(4), SOLVE)
    explicit = dq.ExplicitModel(dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8, injection=False)))
    lm = dq.CausalLM(6, model)
    problem = tasks.WordProblem(tasks.cyclic(3))
    wide, counted, drawn = torch.ones(2, 3, 16), {"batch": 2, "length": 3}, torch.Generator()
    solver: dict[str, Any] = {"solver": dq.Anderson(), "stop": dq.Stop()}
    fields = {**solver, "gradient": dq.Phantom(2), "sweep": dq.Simultaneous(), "start": "zero"}
    rest = {"callback": told, "throw": False, "solve": SOLVE}
    sizes = {"d_model": 16, "n_layers": 1, "dropout": 0.1, "norm_eps": 1e-5, "weight_norm": True, "injection": True}
    mamba = {"d_state": 4, "headdim": 8, "expand": 2, "n_groups": 1, "d_conv": 4, "mlp_width": 8, "chunk_size": 8}
    mamba |= {"dt_limit": (0.0, 0.1), "backend": "reference"}
    spec = {"vocab_size": 6, "backbone": dq.Mamba2Config(d_model=16, d_state=4, headdim=8)}
    spec |= {"solve": SOLVE, "eval_solve": SOLVE, "tied": True, "embedding_std": 0.02, "embedding_dropout": 0.1}
    sampled = {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 0, "stop_tokens": (1,), "pad_token": 0}
    diagnosed = {"model": lm, "ids": IDS, "mask": MASK, "solve": SOLVE}
    part, evaluation = dq.ExplicitModel(dq.Affine(4)), model.evaluate(X)
    depth = dq.RecurrentDepth(part, dq.ImplicitModel(dq.Affine(4)), part)
    return [
        Case("Looped", dq.Looped, {"backbone": dq.Affine(4), "steps": 2, "choose": told, "start": "zero"}),
        Case("AddInjection", dq.Injected, {"backbone": dq.Affine(4), "injection": dq.AddInjection()}),
        Case(
            "RecurrentDepth", dq.RecurrentDepth, {"prelude": part, "core": dq.ImplicitModel(dq.Affine(4)), "coda": part}
        ),
        Case("recurrent model", depth, {"x": X, "mask": MASK, "return_cache": False, **rest, **fields}),
        Case("recurrent cache", depth, {"x": X, "cache": depth(X, return_cache=True).cache}),
        Case("terminal_residual", training.terminal_residual, {"f": square, "z": X, "mask": MASK}),
        Case("solve", dq.solve, {"f": square, "z0": X, **solver, "callback": told}),
        Case("solve has_aux", dq.solve, {"f": lambda z: (square(z), z), "z0": X, **solver, "has_aux": True}),
        Case("fixed_point", dq.fixed_point, {"f": square, "z0": X, **solver, "throw": False}),
        Case("fixed_point gradient", dq.fixed_point, {"f": linear, "z0": X, "gradient": dq.OneStep()}),
        Case("Mamba2Config", dq.Mamba2Config, sizes | mamba),
        Case("implicit model", model, {"x": X, "mask": MASK, "return_cache": False, **rest, **fields}),
        Case("evaluate", model.evaluate, {"x": X, "start": X, "iterations": 2}),
        Case("recurrent evaluate", depth.evaluate, {"x": X, "start": X, "iterations": 2}),
        Case("commit", model.commit, {"cache": None, "evaluation": evaluation}),
        Case("implicit cache", model, {"x": X, "cache": model(X, return_cache=True).cache}),
        Case("explicit model", explicit, {"x": wide, "mask": MASK, "return_cache": False}),
        Case("explicit cache", explicit, {"x": wide, "cache": explicit(wide, return_cache=True).cache}),
        Case("lm", lm, {"input_ids": IDS, "labels": IDS, "mask": MASK, "return_cache": False, **rest, **fields}),
        Case("lm targets", lm, {"input_ids": IDS, "targets": IDS}),
        Case(
            "generate", lm.generate, {"input_ids": IDS, "max_new_tokens": 2, "mask": MASK, **sampled, "callback": told}
        ),
        Case("generate solve", lm.generate, {"input_ids": IDS, "max_new_tokens": 2, "solve": SOLVE, **fields}),
        Case("Phase.apply", training.free().apply, {"model": lm}),
        Case("Curriculum", training.Curriculum, {"phases": (training.free(),), "unit": "fraction"}),
        Case("parameter_groups", training.parameter_groups, {"model": lm, "weight_decay": 0.1}),
        Case("check_finite", training.check_finite, {"value": 1.0, "step": 3, "phase": "free"}),
        Case("jacobian_regularisation", training.jacobian_regularisation, {"f": square, "z_star": X}),
        Case("cyclic", tasks.cyclic, {"n": 3}),
        Case("symmetric", tasks.symmetric, {"n": 3}),
        Case("parse_group", tasks.parse_group, {"name": "Z3"}),
        Case("generators", tasks.generators, {"monoid": tasks.cyclic(3), "count": 1}),
        Case("prefix_products", tasks.prefix_products, {"monoid": tasks.cyclic(4), "tokens": IDS}),
        Case("WordProblem", tasks.WordProblem, {"monoid": tasks.cyclic(3), "inputs": (1, 2)}),
        Case("WordProblem p", tasks.WordProblem, {"monoid": tasks.cyclic(3), "identity_probability": 0.5}),
        Case("sample", problem.sample, {**counted, "generator": drawn}),
        Case("batches", problem.batches, {**counted, "seed": 0}),
        Case("fixed", problem.fixed, {"size": 2, "length": 3, "seed": 0}),
        Case("with_weights", layers.with_weights, {"module": nn.Linear(2, 2)}),
        Case("dropout_mask", layers.dropout_mask, {"like": X, "p": 0.5}),
        Case("token_effort", diagnostics.token_effort, diagnosed),
        Case("model_spectral_radius", diagnostics.model_spectral_radius, diagnosed),
        Case("spectral_radius", diagnostics.spectral_radius, {"f": square, "z_star": X, "products": 3, "seed": 0}),
        Case("gradient_bias", diagnostics.gradient_bias, {**diagnosed, "estimators": [dq.OneStep()]}),
        Case("check_duality", diagnostics.check_duality, {**diagnosed, "sweeps": [dq.Simultaneous(), dq.Sequential()]}),
    ]


NEITHER = object()
NO_INTEGER = ("3", 1.5, True, math.nan, [], NEITHER, 1j, -1, torch.ones(2))
NO_NUMBER = ("0.1", math.nan, True, [], NEITHER, 1j, -1.0, torch.ones(2), math.inf)
NO_FLAG = ("yes", 1, 0.0, [], NEITHER)
NO_TEXT = ("misspelt", 3, [], NEITHER)
NO_FUNCTION = (3, "square", [], NEITHER)
FINE: set[tuple[str, str, str]] = {  # what looks wrong, and is taken
    ("commit", "cache", "None"),
    ("generate", "seed", "-1"),
    ("generate", "pad_token", "-1"),
    ("check_finite", "phase", "'misspelt'"),
    ("check_finite", "value", "-1.0"),
    ("check_finite", "value", "nan"),
    ("check_finite", "value", "inf"),
    ("solve", "z0", "torch.float32 (3, 4)"),
    ("terminal_residual", "z", "torch.float32 (3, 4)"),
    ("spectral_radius", "z_star", "torch.float32 (3, 4)"),
    ("spectral_radius", "seed", "-1"),
    ("fixed_point", "z0", "torch.float32 (3, 4)"),
    ("generate", "stop_tokens", "3"),
    ("solve has_aux", "z0", "torch.float32 (3, 4)"),
    ("fixed_point gradient", "z0", "torch.float32 (3, 4)"),
    ("jacobian_regularisation", "z_star", "torch.float32 (3, 4)"),
    ("dropout_mask", "like", "torch.float32 (3, 4)"),
    ("dropout_mask", "like", "torch.float32 (2, 0, 4)"),
    ("dropout_mask", "like", "torch.float32 (0, 3, 4)"),
    ("prefix_products", "tokens", "torch.int64 (2, 3)"),
}


def wrong(value: Any) -> Iterator[Any]:
    """Values that are none of the kind of one that works."""
    if isinstance(value, bool):
        yield from NO_FLAG
    elif isinstance(value, int):
        yield from NO_INTEGER
    elif isinstance(value, float):
        yield from NO_NUMBER
    elif isinstance(value, str):
        yield from NO_TEXT
    elif isinstance(value, Tensor):
        yield from ("text", 3.0, value.tolist(), value[0], value[:, :0], value[:0], value.to(torch.complex64), NEITHER)
        if value.dtype == torch.bool:
            yield from (value.long(), ~value & value, value[:, :1])
        elif value.dtype == torch.int64:
            yield from (value.float(), value - 5, value + 1000, value.to("meta"))
        else:
            yield value.long()
    elif inspect.isfunction(value):
        yield from NO_FUNCTION
    elif isinstance(value, tuple | list):
        yield from (3, "text", NEITHER, [NEITHER], ["text"], [None])
    else:
        yield from ("anderson", 3, [], {}, NEITHER, type(value), torch.ones(2))


class Met(NamedTuple):
    """What a bad input met."""

    case: str
    argument: str
    value: str
    verdict: str
    error: str


def shown(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def met(case: Case, argument: str, value: object, arguments: dict[str, Any]) -> Met:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call(**arguments)
    except (TypeError, ValueError) as error:
        named = re.search(rf"\b{argument}\b", str(error))
        verdict, text = "clear" if named else "obscure", f"{type(error).__name__}: {error}"
    except Exception as error:
        verdict, text = "obscure", f"{type(error).__name__}: {error}"
    else:
        verdict, text = "silent", ""
    return Met(case.name, argument, shown(value), verdict, text)


def everything() -> Iterator[Met]:
    for case in cases():
        signature = inspect.signature(case.call.forward if isinstance(case.call, nn.Module) else case.call)
        for argument, value in case.arguments.items():
            known = signature.parameters.get(argument)
            optional = known is None or known.default is None or argument in ("until", "solve")
            for bad in (*wrong(value), *(() if optional else (None,))):
                if (case.name, argument, shown(bad)) not in FINE:
                    yield met(case, argument, bad, {**case.arguments, argument: bad})
            if known is not None and known.default is inspect.Parameter.empty:
                yield met(case, argument, "missing", {k: v for k, v in case.arguments.items() if k != argument})
        yield met(case, "misspelt", 1, {**case.arguments, "misspelt": 1})


@pytest.mark.usefixtures("unchecked")
def test_the_calls_work():
    for case in cases():
        case.call(**case.arguments)


@pytest.mark.usefixtures("unchecked")
def test_bad_inputs_are_named():
    found = list(everything())
    count = Counter(one.verdict for one in found)
    unclear = "\n".join(map(str, (one for one in found if one.verdict != "clear")))
    assert len(found) >= 1400
    assert count["silent"] == 0, unclear
    assert count["clear"] >= 0.98 * len(found), unclear


if __name__ == "__main__":
    results = list(everything())
    for one in results:
        if one.verdict != "clear":
            print(one.verdict, one.case, one.argument, one.value, one.error.replace("\n", " ")[:160], sep=" | ")
    print(Counter(one.verdict for one in results), file=sys.stderr)
