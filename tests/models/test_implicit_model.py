"""Implicit models: every sweep finds the same fixed point, gradient and cache; failure is data."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import deqseq as dq

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))
BACKBONES = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)
OTHER_SWEEPS = (dq.Chunked(3), dq.Sequential(), dq.Sliding(3), dq.Sliding(8))
SWEEPS = pytest.mark.parametrize("sweep", [dq.Simultaneous(), *OTHER_SWEEPS], ids=str)


@pytest.mark.usefixtures("unchecked")
class TestSweeps:
    @SWEEPS
    def test_the_affine_model_finds_the_known_answer(self, sweep):
        backbone = affine()
        output = dq.ImplicitModel(backbone, TIGHT)(embedded(), sweep=sweep)
        assert output.converged.all()
        assert (output.value - backbone.solution(embedded())).abs().max() < 1e-9

    @BACKBONES
    @pytest.mark.parametrize(
        "gradient",
        [dq.Phantom(4, 0.8), dq.OneStep(), dq.Implicit(stop=TIGHT.stop)],
        ids=lambda gradient: type(gradient).__name__,
    )
    def test_they_give_the_same_gradient(self, make, gradient):
        model = dq.ImplicitModel(make(), TIGHT)
        gradients = []
        towards = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for sweep in (dq.Simultaneous(), dq.Sequential(), dq.Sliding(3)):
            model.zero_grad()
            (model(embedded(), sweep=sweep, gradient=gradient).value * towards).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for first, *others in zip(*gradients, strict=True):
            assert first.abs().max() > 0
            assert all(torch.allclose(first, other, atol=1e-7) for other in others)

    @pytest.mark.parametrize("sweep", [dq.Chunked(3), dq.Chunked(50), dq.Sequential()], ids=str)
    @pytest.mark.parametrize("length", [1, 7])
    def test_statistics_are_per_token_whatever_the_length(self, sweep, length):
        stats = dq.ImplicitModel(affine()).eval()(embedded(length=length), sweep=sweep).stats
        assert stats.iterations.shape == stats.residual.shape == stats.updates.shape == (2, length)

    @SWEEPS
    def test_a_chunk_that_fails_makes_its_row_fail(self, sweep):
        x = embedded()
        x[1, 4] = torch.nan
        output = dq.ImplicitModel(affine()).eval()(x, sweep=sweep)
        assert output.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gradient": dq.Unrolled()}, "Unrolled .* Simultaneous sweep.* take Phantom"),
            ({"trace": True}, r"trace=True needs the Simultaneous sweep, got Chunked\(size=2\)"),
        ],
        ids=["Unrolled", "trace"],
    )
    def test_what_needs_the_simultaneous_sweep_says_so(self, options, message):
        model = dq.ImplicitModel(affine())
        with pytest.raises(ValueError, match=message):
            model(embedded(), sweep=dq.Chunked(2), **options)
        assert model(embedded(), **options).value.shape == (2, 7, 8)
        if "gradient" in options:  # without gradients nothing is differentiated
            with torch.no_grad():
                assert model(embedded(), sweep=dq.Chunked(2), **options).value.shape == (2, 7, 8)


@pytest.mark.parametrize("length", [1, 5])
def test_a_start_at_the_input_makes_one_iteration_a_pass_of_the_layers(length):
    model, x = dq.ImplicitModel(affine(), dq.SolveConfig(dq.Naive(), dq.Stop.exactly(1))), embedded(length=length)
    expected, _ = model.backbone(x, model.backbone.prepare(x))
    with torch.no_grad():
        assert torch.equal(model(x, start="input").value, expected)
        assert torch.equal(model(x).value, model.backbone.prepare(x).injection)


class TestFailure:
    def failing(self, **options):
        x = embedded()
        x[1] = 0  # its fixed point is zero, found at once
        return dq.ImplicitModel(affine()).eval()(x, stop=dq.Stop(rtol=1e-11, max_steps=3), **options)

    @SWEEPS
    def test_it_is_data_unless_an_error_is_asked_for(self, sweep):
        output = self.failing(sweep=sweep)
        assert output.converged.tolist() == [False, True]
        with pytest.raises(dq.ConvergenceError, match=r"1 of 2 rows.* Remedy: raise Stop\.max_steps") as raised:
            output.raise_if_failed()
        assert raised.value.rows == [0]
        assert raised.value.residuals == [output.stats.residual[0].max().item()]
        with pytest.raises(dq.ConvergenceError, match="1 of 2 rows"):
            self.failing(sweep=sweep, throw=True)

    def test_training_on_nothing_but_diverged_rows_warns(self):
        model = dq.ImplicitModel(affine())
        model.backbone.U.data.fill_(torch.nan)
        with pytest.warns(dq.ConvergenceWarning, match="failed for 2 of 2 rows"):
            model(embedded())


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
        model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=stop, gradient=dq.Implicit(stop=stop)))
        x = embedded(1, 3, 4).requires_grad_()
        names = ["layers.0.mixer.in_proj.weight", "layers.0.mixer.A_log", "norm_f.weight"]
        parameters = [dict(backbone.named_parameters())[name] for name in names]
        assert torch.autograd.gradcheck(lambda *_: model(x).value, (x, *parameters), eps=1e-6, atol=1e-6)

    @pytest.mark.parametrize("gradient", [dq.Unrolled, lambda **options: dq.Phantom(3, **options)], ids=["U", "P"])
    def test_checkpointing_under_weight_norm_changes_none(self, gradient):
        model = dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=dq.Stop.exactly(6)))
        gradients, towards = [], torch.randn(2, 7, 8, dtype=torch.float64)
        for checkpoint in (False, True):
            model.zero_grad()
            (model(embedded(), gradient=gradient(checkpoint=checkpoint)).value * towards).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for one, two in zip(*gradients, strict=True):
            assert one.abs().max() > 0
            assert torch.allclose(one, two, rtol=1e-10, atol=1e-14)

    @SWEEPS
    def test_any_parametrisation_gets_its_own_after_every_sweep(self, sweep):
        model = dq.ImplicitModel(WithConv().double())
        model(embedded(), sweep=sweep).value.square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())

    def test_eval_mode_gives_them_and_frozen_parameters_cost_none(self):
        model = dq.ImplicitModel(contractive_mamba2(), TIGHT).eval()
        model(embedded()).value.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.requires_grad_(False)
        assert not model(embedded()).value.requires_grad
        x = embedded().requires_grad_()
        model(x).value.square().sum().backward()
        assert x.grad.abs().max() > 0

    def test_bfloat16_autocast_trains_in_float32_states(self):
        model = dq.ImplicitModel(contractive_mamba2().float(), dq.SolveConfig(stop=dq.Stop.exactly(8)))
        towards = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1))  # the final norm fixes the size of z

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


def test_a_row_alone_is_the_row_in_its_batch():
    model, x = dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=dq.Stop(rtol=1e-6))).eval(), embedded(4)
    together = model(x)
    for row in range(4):
        alone = model(x[row : row + 1])
        assert torch.allclose(alone.value[0], together.value[row], atol=1e-12)
        assert alone.stats.iterations[0] == together.stats.iterations[row]
