"""Truncated backpropagation: ``Unrolled(last=k)`` against loops written by hand."""

import pytest
import torch
from gradient_problems import gradients, make
from graph_contract import problems
from small_models import contractive_llama, contractive_mamba2, embedded

import deqseq as dq

pytestmark = pytest.mark.usefixtures(
    "unchecked"
)  # the docstrings' examples run with the checks of shapes


def looped(f, z, steps, last, damping=1.0):
    """The value of the last of ``steps`` evaluations, of which ``last`` have a graph."""
    for step in range(1, steps + 1):
        with torch.set_grad_enabled(step > steps - last):
            fz = f(z)
            z = z + damping * (fz - z)
    return fz


@problems
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("steps", "last"), [(9, 1), (9, 4), (9, 9), (3, 8), (1, 1)])
@pytest.mark.parametrize("damping", [1.0, 0.7])
def test_is_the_loop_without_and_then_with_a_graph(problem, checkpoint, steps, last, damping):
    case = make(problem)
    options = {"solver": dq.Relaxed(damping), "stop": dq.Stop.exactly(steps)}
    f = case.f(case.injection())
    solution = dq.fixed_point(f, case.z0, gradient=dq.Unrolled(checkpoint, last), **options)
    wanted = looped(f, case.z0, steps, last, damping)
    torch.testing.assert_close(solution.value, wanted, rtol=1e-12, atol=1e-12)
    assert solution.stats.evaluations == steps
    ours = gradients(case.loss(solution.value), case.leaves, retain_graph=True)
    theirs = gradients(case.loss(wanted), case.leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make_backbone", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize("start", ["zero", "input"])
@pytest.mark.parametrize(("steps", "last"), [(7, 3), (3, 3), (2, 3)])
@pytest.mark.parametrize("lengths", [[7, 7], [7, 5]], ids=["whole", "padded"])
def test_a_models_gradients(make_backbone, start, steps, last, lengths):
    backbone = make_backbone()
    x = embedded().requires_grad_()
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(steps), dq.Unrolled(last=last), start=start)
    ours = dq.ImplicitModel(backbone, solve)(x, mask=mask).value
    real = mask[..., None]
    tokens = x * real
    inputs = backbone.prepare(tokens, None, mask)
    z0 = tokens if start == "input" else 0 * tokens
    if steps > last:
        z0 = z0.detach()
    theirs = looped(lambda z: backbone(z, inputs)[0] * real, z0, steps, last)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [x, *backbone.parameters()]
    found = torch.autograd.grad((ours**3).sum(), leaves)
    expected = torch.autograd.grad((theirs**3).sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert all(gradient.abs().max() > 0 for gradient in found)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("steps", "last"), [(9, 3), (2, 3)])
def test_only_the_last_evaluations_keep_a_graph(checkpoint, steps, last):
    solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(steps), dq.Unrolled(checkpoint, last))
    model = dq.ImplicitModel(dq.Affine(4), solve)
    graphs = []
    calls = []
    model.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    model.backbone.register_forward_hook(
        lambda part, inputs, output: graphs.append(output[0].requires_grad)
    )
    value = model(torch.ones(2, 3, 4)).value
    without = max(0, steps - last)
    assert len(graphs) == len(calls) == steps
    assert not any(graphs[1:without])  # the first has one that is cut at once
    assert all(graphs[without:])
    value.sum().backward()
    assert len(calls) == steps + checkpoint * min(last, steps)
    graphs.clear()
    with torch.no_grad():
        model(torch.ones(2, 3, 4))
    assert graphs == [False] * steps


def test_under_autocast_parameters_get_gradients():
    layer = torch.nn.Linear(3, 3)
    options = {"stop": dq.Stop.exactly(6), "gradient": dq.Unrolled(last=2)}
    with torch.autocast("cpu", torch.bfloat16):
        value = dq.fixed_point(lambda z: torch.tanh(layer(z)), torch.zeros(2, 3), **options).value
    value.sum().backward()
    assert layer.weight.grad.abs().max() > 0
    assert value.dtype == torch.float32


@pytest.mark.parametrize(("steps", "expected"), [(2, 0.25), (3, None)])
def test_the_start_gets_a_gradient_only_if_all_is_differentiated(steps, expected):
    z0 = torch.ones(1, 1, requires_grad=True)
    a = torch.tensor(0.5, requires_grad=True)
    options = {"stop": dq.Stop.exactly(steps), "gradient": dq.Unrolled(last=2)}
    dq.fixed_point(lambda z: a * z + 1, z0, solver=dq.Naive(), **options).value.backward()
    assert z0.grad == expected


def test_a_tolerance_cannot_be_counted_from_the_end():
    a = torch.tensor(0.5, requires_grad=True)
    call = {"f": lambda z: a * z + 1, "z0": torch.zeros(1, 1), "gradient": dq.Unrolled(last=2)}
    with pytest.raises(
        ValueError, match=r"Unrolled.last counts from the end: stop must be Stop.exactly\(n\)"
    ):
        dq.fixed_point(**call, stop=dq.Stop(max_steps=9))
    with torch.no_grad():
        assert dq.fixed_point(**call, stop=dq.Stop(rtol=1e-3)).converged.all()
