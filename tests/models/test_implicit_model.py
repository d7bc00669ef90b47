"""Implicit models: padded rows, starts, gradients, attributes, and rows that fail."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import deqseq as dq

SWEEPS = pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3)])


@SWEEPS
@pytest.mark.usefixtures("unchecked")
def test_statistics_of_padded_rows_are_put_back_in_their_places(sweep):
    mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    stop = dq.Stop(rtol=1e-11, max_steps=2)
    model = dq.ImplicitModel(affine()).eval()
    stats = model(embedded(), mask=mask, sweep=sweep, stop=stop).stats
    for numbers in (stats.iterations, stats.residual, stats.forced):
        assert torch.equal(numbers > 0, mask)


@pytest.mark.usefixtures("unchecked")
def test_an_estimator_that_differentiates_the_iteration_needs_all_tokens_together():
    model = dq.ImplicitModel(affine(), dq.SolveConfig(gradient=dq.Unrolled()))
    with pytest.raises(ValueError, match=r"Unrolled .* Simultaneous sweep.* take Phantom"):
        model(embedded(), sweep=dq.Chunked(2))
    assert model(embedded()).value.requires_grad
    with torch.no_grad():  # nothing is differentiated
        assert model(embedded(), sweep=dq.Chunked(2)).value.shape == (2, 7, 8)


class WithConv(dq.Affine):
    def __init__(self):
        super().__init__(8)
        self.mix = weight_norm(nn.Conv1d(8, 8, 1, bias=False))
        self.mix.parametrizations.weight.original0.data *= 0.1

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + self.mix(z.transpose(1, 2)).transpose(1, 2), aux


@SWEEPS
def test_any_parametrisation_gets_its_gradients_after_every_sweep(sweep):
    model = dq.ImplicitModel(WithConv().double())
    model(embedded(), sweep=sweep).value.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


def test_frozen_parameters_make_no_graph():
    model = dq.ImplicitModel(contractive_mamba2()).eval().requires_grad_(False)
    x = embedded()
    assert not model(x).value.requires_grad
    model(x.requires_grad_()).value.square().sum().backward()
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["solver", "stop", "gradient", "sweep", "start"])
def test_attributes_that_nothing_reads_are_refused(name):
    model = dq.ImplicitModel(dq.Affine(4))
    with pytest.raises(AttributeError, match=rf"ImplicitModel\.{name} .*\.solve = SolveConfig"):
        setattr(model, name, dq.Naive())
    lm = dq.CausalLM(7, model)
    for attribute in (name, "solve", "eval_solve"):
        with pytest.raises(AttributeError, match=rf"CausalLM\.{attribute} "):
            setattr(lm, attribute, dq.SolveConfig())


@pytest.mark.parametrize(
    ("name", "value"), [("solve", None), ("solve", "Anderson"), ("eval_solve", dq.Stop())]
)
def test_how_a_model_is_solved_is_a_configuration(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a SolveConfig"):
        setattr(dq.ImplicitModel(dq.Affine(4)), name, value)


@SWEEPS
@pytest.mark.parametrize("gradient", [dq.Phantom(), dq.Implicit(), dq.OneStep()])
def test_a_row_that_is_not_finite_gives_no_gradient_through_what_was_prepared(sweep, gradient):
    """0 x NaN would be NaN, so the row must not be in the graph of the injection and its norm."""
    model = dq.ImplicitModel(contractive_llama(), dq.SolveConfig(gradient=gradient, sweep=sweep))
    x = embedded(3)
    x[1, 2, 0] = torch.nan
    gradients = []
    for rows in (x, x[[0, 2]]):
        output = model(rows)
        loss = output.value[output.converged].square().sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    torch.testing.assert_close(*gradients)
