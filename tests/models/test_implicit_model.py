"""Implicit models: gradients of every sweep, numbers of padded rows, starts, and
failure as data.
"""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import deqseq as dq
from deqseq.start import initial_state

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))
SWEEPS = pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3)], ids=str)


@pytest.mark.usefixtures("unchecked")
class TestSweeps:
    @SWEEPS
    def test_numbers_of_padded_rows_are_put_back_in_their_places(self, sweep):
        mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
        stop = dq.Stop(rtol=1e-11, max_steps=2)
        stats = (
            dq.ImplicitModel(affine()).eval()(embedded(), mask=mask, sweep=sweep, stop=stop).stats
        )
        for numbers in (stats.iterations, stats.residual, stats.forced):
            assert torch.equal(numbers > 0, mask)

    def test_an_estimator_that_differentiates_the_iteration_needs_all_tokens_together(self):
        model = dq.ImplicitModel(affine(), dq.SolveConfig(gradient=dq.Unrolled()))
        with pytest.raises(ValueError, match=r"Unrolled .* Simultaneous sweep.* take Phantom"):
            model(embedded(), sweep=dq.Chunked(2))
        assert model(embedded()).value.requires_grad
        with torch.no_grad():  # nothing is differentiated
            assert model(embedded(), sweep=dq.Chunked(2)).value.shape == (2, 7, 8)


STARTS = pytest.mark.parametrize("start", ["zero", "input", dq.RandomStart(0.5, seed=0)], ids=str)


@STARTS
@pytest.mark.parametrize("length", [1, 5])
def test_one_iteration_is_a_pass_of_the_layers_from_the_start(start, length):
    model, x = (
        dq.ImplicitModel(affine(), dq.SolveConfig(dq.Naive(), dq.Stop.exactly(1))),
        embedded(length=length),
    )
    expected, _ = model.backbone(initial_state(start, x), model.backbone.prepare(x))
    with torch.no_grad():
        assert torch.equal(model(x, start=start).value, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_to_begin_from_are_those_of_the_tokens_whatever_the_padding(side):
    model, x, given = dq.ImplicitModel(affine()), embedded(2, 6), embedded(2, 6).flip(2)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask, stop = mask if side == "right" else mask.flip(1), dq.Stop.exactly(2)
    with torch.no_grad():
        together = model(x, start=given, mask=mask, stop=stop).value
        for row, real in enumerate(mask):
            alone = model(x[None, row, real], start=given[None, row, real], stop=stop).value[0]
            torch.testing.assert_close(together[row, real], alone, rtol=0, atol=1e-12)


class WithConv(dq.Affine):
    def __init__(self) -> None:
        super().__init__(8)
        self.mix = weight_norm(nn.Conv1d(8, 8, 1, bias=False))
        self.mix.parametrizations.weight.original0.data *= 0.1

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + self.mix(z.transpose(1, 2)).transpose(1, 2), aux


class TestGradients:
    @pytest.mark.slow
    def test_implicit_gradient_of_a_mamba2_block_by_finite_differences(self):
        backbone = contractive_mamba2(n_layers=1, d_model=4, d_state=2, weight_norm=False)
        stop = dq.Stop(rtol=1e-14, max_steps=500)
        model = dq.ImplicitModel(
            backbone, dq.SolveConfig(stop=stop, gradient=dq.Implicit(stop=stop))
        )
        x = embedded(1, 3, 4).requires_grad_()
        names = ["layers.0.mixer.in_proj.weight", "layers.0.mixer.A_log", "norm_f.weight"]
        parameters = [dict(backbone.named_parameters())[name] for name in names]
        assert torch.autograd.gradcheck(
            lambda *_: model(x).value, (x, *parameters), eps=1e-6, atol=1e-6
        )

    @SWEEPS
    def test_any_parametrisation_gets_its_own_after_every_sweep(self, sweep):
        model = dq.ImplicitModel(WithConv().double())
        model(embedded(), sweep=sweep).value.square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())

    def test_frozen_parameters_cost_none(self):
        model = dq.ImplicitModel(contractive_mamba2(), TIGHT).eval().requires_grad_(False)
        assert not model(embedded()).value.requires_grad
        x = embedded().requires_grad_()
        model(x).value.square().sum().backward()
        assert x.grad.abs().max() > 0

    def test_bfloat16_autocast_trains_in_float32_states(self):
        model = dq.ImplicitModel(
            contractive_mamba2().float(), dq.SolveConfig(stop=dq.Stop.exactly(8))
        )
        towards = torch.randn(
            2, 7, 8, generator=torch.Generator().manual_seed(1)
        )  # the final norm fixes the size of z

        def gradients(autocast: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                value = model(embedded().float()).value
            (value * towards).sum().backward()
            return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

        (half, half_gradients), (full, full_gradients) = gradients(True), gradients(False)
        assert half.dtype == torch.float32
        assert ((half - full).norm() / full.norm()).item() < 0.05
        for name, gradient in full_gradients.items():
            assert ((half_gradients[name] - gradient).norm() / gradient.norm()).item() < 0.1, name


@pytest.mark.parametrize("name", ["solver", "stop", "gradient", "sweep", "start"])
def test_attributes_that_nothing_reads_are_refused(name):
    model = dq.ImplicitModel(dq.Affine(4))
    with pytest.raises(
        AttributeError, match=rf"ImplicitModel\.{name} .*implicit_model\.solve = SolveConfig"
    ):
        setattr(model, name, dq.Naive())
    lm = dq.CausalLM(7, model)
    for one in (name, "solve", "eval_solve"):
        with pytest.raises(AttributeError, match=rf"CausalLM\.{one} "):
            setattr(lm, one, dq.SolveConfig())
    for value in (None, "Anderson"):
        with pytest.raises(TypeError, match="solve must be a SolveConfig"):
            model.solve = value
    with pytest.raises(TypeError, match="eval_solve must be a SolveConfig"):
        model.eval_solve = dq.Stop()


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3)], ids=str)
@pytest.mark.parametrize("estimator", [dq.Phantom(), dq.Implicit(), dq.OneStep()], ids=str)
def test_a_row_that_is_not_finite_gives_no_gradient_through_what_was_prepared(sweep, estimator):
    """0 x NaN would be NaN: the row must not be in the graph of the injection and its
    norm either.
    """
    model = dq.ImplicitModel(
        contractive_llama(), dq.SolveConfig(gradient=estimator, sweep=sweep)
    ).train()
    x = embedded(3)
    x[1, 2, 0] = torch.nan
    gradients = []
    for rows in (x, x[[0, 2]]):
        model.zero_grad()
        output = model(rows)
        output.value[output.converged].square().sum().backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)
