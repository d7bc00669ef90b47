"""Every argument of every public call with tensors is named by an error, given a value of a wrong
type, shape or dtype.

The inputs are generated from calls that work.
"""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from test_bad_values import NEITHER, arguments, assert_clear, bad_values, met, shown
from torch import Tensor, nn

import deqseq as dq
from deqseq import diagnostics, layers, tasks, training

X = torch.ones(2, 3, 4)
IDS = torch.tensor([[1, 2, 3], [3, 2, 1]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
SOLVE = dq.SolveConfig(stop=dq.Stop(max_steps=4))


def square(z, args=None):
    return 0.5 * torch.tanh(z)


def square_and_z(z):
    return square(z), z


LINEAR = nn.Linear(4, 4)


def linear(z):
    return 0.1 * LINEAR(z)


def told(_):
    """A callback."""


def cases():
    """Calls that work, with tensors or without the decorator; of the others ``test_bad_values.py``
    has the annotations.
    """
    torch.manual_seed(0)
    model = dq.ImplicitModel(dq.Affine(4), SOLVE)
    explicit = dq.ExplicitModel(dq.Affine(4))
    depth = dq.RecurrentDepth(explicit, dq.ImplicitModel(dq.Affine(4)), explicit)
    lm = dq.CausalLM(6, model)
    group = tasks.parse_group("Z3")
    solver: dict[str, Any] = {"solver": dq.Anderson(), "stop": dq.Stop()}
    fields = {**solver, "gradient": dq.Phantom(2), "sweep": dq.Simultaneous(), "start": "zero"}
    output = {"mask": MASK, "return_cache": False}
    rest = {**output, "callback": told, "throw": False, "solve": SOLVE, **fields}
    prompt = {"input_ids": IDS, "max_new_tokens": 2}
    numbers = {"window": 2, "temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 0}
    ends = {"stop_tokens": (1,), "pad_token": 0, "callback": told}
    diagnosed = {"model": lm, "ids": IDS, "mask": MASK, "solve": SOLVE}
    sweeps = [dq.Simultaneous(), dq.Sequential()]
    evaluated = {"x": X, "start": X, "iterations": 2}

    def with_cache(model):
        return {"x": X, "cache": model(X, return_cache=True).cache}

    return {
        "solve": (dq.solve, {"f": square, "z0": X, **solver, "callback": told}),
        "solve has_aux": (dq.solve, {"f": square_and_z, "z0": X, **solver, "has_aux": True}),
        "fixed_point": (dq.fixed_point, {"f": square, "z0": X, **solver, "throw": False}),
        "gradient": (dq.fixed_point, {"f": linear, "z0": X, "gradient": dq.OneStep()}),
        "implicit": (model, {"x": X, **rest}),
        "implicit start": (model, {"x": X, "start": X}),
        "implicit cache": (model, with_cache(model)),
        "evaluate": (model.evaluate, evaluated),
        "commit": (model.commit, {"cache": None, "evaluation": model.evaluate(X)}),
        "recurrent": (depth, {"x": X, **rest}),
        "recurrent cache": (depth, with_cache(depth)),
        "recurrent evaluate": (depth.evaluate, evaluated),
        "explicit": (explicit, {"x": X, **output}),
        "explicit cache": (explicit, with_cache(explicit)),
        "lm": (lm, {"input_ids": IDS, "labels": IDS, **rest}),
        "lm targets": (lm, {"input_ids": IDS, "targets": IDS}),
        "generate": (lm.generate, {**prompt, "mask": MASK, **numbers, **ends}),
        "generate solve": (lm.generate, {**prompt, "solve": SOLVE, **fields}),
        "Curriculum": (training.Curriculum, {"phases": (training.free(),), "unit": "fraction"}),
        "regularised": (training.jacobian_regularisation, {"f": square, "z_star": X}),
        "prefix_products": (tasks.prefix_products, {"monoid": group, "tokens": IDS % 3}),
        "WordProblem": (tasks.WordProblem, {"monoid": group, "inputs": (1, 2)}),
        "batches": (tasks.WordProblem(group).batches, {"batch": 2, "length": 3, "seed": 0}),
        "with_weights": (layers.with_weights, {"module": nn.Linear(2, 2)}),
        "dropout_mask": (layers.dropout_mask, {"like": X, "p": 0.5}),
        "model_spectral_radius": (diagnostics.model_spectral_radius, diagnosed),
        "spectral": (diagnostics.spectral_radius, {"f": square, "z_star": X, "products": 3}),
        "duality": (diagnostics.check_duality, {**diagnosed, "sweeps": sweeps}),
    }


FINE = {  # what looks wrong, and is taken by a map or a mask, or as an empty batch, or converted
    "z0": {"torch.float32 (3, 4)", "torch.float64 (2, 3, 4)"},
    "z_star": {"torch.float32 (3, 4)", "torch.float64 (2, 3, 4)"},
    "like": {
        "torch.float32 (2, 3, 4)",
        "torch.float32 (3, 4)",
        "torch.float32 (2, 0, 4)",
        "torch.float32 (0, 3, 4)",
        "torch.float64 (2, 3, 4)",
    },
    "stop_tokens": {"3"},
    **{name: {"torch.int32 (2, 3)"} for name in ("input_ids", "labels", "targets", "ids")},
}


def wrong(value, annotation):
    """Values that are none of the kind of one that works, and of its annotation."""
    if isinstance(value, Tensor):
        yield from ("text", 3.0, value.tolist(), NEITHER)
        yield from (value[0], value[:, :0], value[:0], value.to(torch.complex64))
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


def everything():
    """Calls in which an argument is bad, missing or misspelt."""
    for name, (call, working) in cases().items():
        function = call.forward if isinstance(call, nn.Module) else call
        parameters = inspect.signature(function).parameters
        hints = arguments(function)
        for argument, value in working.items():
            for bad in wrong(value, hints.get(argument, Any)):
                if shown(bad) not in FINE.get(argument, ()):
                    yield met(name, argument, bad, partial(call, **working | {argument: bad}))
            if argument in parameters and parameters[argument].default is inspect.Parameter.empty:
                others = {key: working[key] for key in working.keys() - {argument}}
                yield met(name, argument, "missing", partial(call, **others))
        yield met(name, "misspelt", 1, partial(call, **working, misspelt=1))


@pytest.mark.usefixtures("unchecked")
def test_the_calls_work():
    for call, working in cases().values():
        call(**working)


@pytest.mark.usefixtures("unchecked")
def test_bad_inputs_are_named():
    assert_clear(list(everything()), 700)


def made():
    return dq.CausalLM(6, dq.ImplicitModel(dq.Affine(4)), tied=False)


def replaced(name, value):
    lm = made()
    setattr(lm.model if hasattr(type(lm.model), name) or name == "backbone" else lm, name, value)


def returning(name, value):
    """A model whose embedding or head returns something else."""
    lm = made()
    getattr(lm, name).forward = lambda x: value
    return lm(IDS)


def cache_of(backbone):
    return dq.ImplicitModel(backbone)(X, return_cache=True).cache


LLAMA = dq.LlamaConfig(4, n_heads=2)
TABLES = torch.arange(3)[None], torch.ones(2), torch.float32


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: made().model(X.to_sparse())),
        ("input_ids", lambda: made()(IDS.to_sparse())),
        ("input_ids", lambda: made().embed(IDS.float())),
        ("tokens", lambda: tasks.prefix_products(tasks.parse_group("Z9"), IDS.to("meta"))),
        ("states", lambda: made().logits(X[..., :3])),
        ("states", lambda: made().logits(None)),
        ("embedding", lambda: returning("embedding", X[:1])),
        ("head", lambda: returning("head", X[..., :1])),
        ("head", lambda: replaced("head", 3)),
        ("backbone", lambda: replaced("backbone", nn.Linear(4, 4))),
        ("solve", lambda: replaced("solve", nn.Linear(4, 4))),
        ("tokens", lambda: cache_of(dq.Affine(4)).reserve(-1)),
        ("tokens", lambda: cache_of(dq.Llama(LLAMA)).reserve("text")),
        ("tokens", lambda: cache_of(dq.Llama(LLAMA)).crop(None)),
        ("rows", lambda: dq.take(X, torch.tensor(0))),
        ("f", lambda: dq.Phantom().attach(3, X)),
        ("z_star", lambda: dq.Implicit().attach(square, None)),
        ("f", lambda: diagnostics.spectral_radius(lambda: X, X)),
        ("f", lambda: training.jacobian_regularisation(lambda: X, X)),
        ("value", lambda: training.check_finite(torch.ones((), device="meta"), step=1)),
        ("theta", lambda: layers.rotary_frequencies(4, "text")),
        ("positions", lambda: layers.rotary_tables(TABLES[0][0], *TABLES[1:])),
        ("frequencies", lambda: layers.rotary_tables(TABLES[0], TABLES[1].long(), TABLES[2])),
        ("LlamaBlock.d_model", lambda: layers.LlamaBlock(layers.Attention(4, 1, 1, 4), 0, 4)),
    ],
)
def test_what_torch_would_refuse_later_or_not_at_all(name, call):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        call()
