"""Residual traces against maps whose rates are known, and iterations written out."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.diagnostics import ResidualTrace, model_spectral_radius, residual_trace
from deqseq.testing.problems import diverging, limit_cycle, row_affine, seeded

TIGHT = dq.Stop(rtol=1e-11, max_steps=500)
IDS = torch.randint(0, 11, (3, 6), generator=seeded(0))


def language_model(backbone, **options):
    torch.manual_seed(1)
    return dq.CausalLM(
        11, dq.ImplicitModel(backbone, dq.SolveConfig(**{"stop": TIGHT, **options})), embedding_std=1.0
    ).double()


def traced(f, z0, solver, stop):
    return ResidualTrace.of(dq.solve(f, z0, solver=solver, stop=stop, trace=True), stop)


@pytest.mark.parametrize("damping", [1.0, 0.8, 0.5])
@pytest.mark.parametrize("check_every", [1, 3])
def test_the_rate_is_that_of_the_damped_map(damping, check_every):
    gains = [0.2, 0.6, -0.5, 0.9]
    f = row_affine(gains)
    stop = dq.Stop(rtol=1e-12, max_steps=1000, check_every=check_every)
    trace = traced(f, torch.zeros(4, 3, dtype=torch.float64), dq.Relaxed(damping), stop)
    expected = [abs(1 - damping + damping * gain) for gain in gains]
    assert trace.converged.all()
    for row, rate in enumerate(expected):
        if trace.iterations[row] >= 8 * check_every:
            assert trace.rates[row].item() == pytest.approx(rate, rel=2e-3)
    assert sum(trace.iterations >= 8 * check_every) >= 2
    assert (trace.checks.diff() == check_every).all()


def test_limit_cycles_and_divergence():
    stop = dq.Stop(max_steps=20)
    cycle = traced(limit_cycle, torch.zeros(1, 1), dq.Naive(), stop)
    assert not cycle.converged.any() and "no" in str(cycle)
    away = traced(diverging, torch.full((1, 1), -0.9), dq.Naive(), dq.Stop(max_steps=12, divergence=1e9))
    assert not away.converged.any()
    two_cycle = traced(lambda z: -z + 1, torch.full((1, 1), 0.9, dtype=torch.float64), dq.Relaxed(0.999), stop)
    assert two_cycle.rates.item() == pytest.approx(0.998, abs=0.05)


def test_the_rate_leaves_out_the_wait_before_the_fall():
    """Five checks at 1, then a fall by 0.5 per iteration: the lower half of the fall begins at 2 ** -3."""
    height = torch.tensor([0, 0, 0, 0, 0, *range(0, -7, -1)]).double()
    for checks in (torch.arange(1, 13), 3 * torch.arange(1, 13)):
        trace = ResidualTrace(checks, 2 ** height[:, None], torch.ones(1), checks[-1:], torch.tensor([True]), 1e-3)
        assert trace.rates.item() == pytest.approx(0.5 ** (1 / int(checks[0])))
    flat = ResidualTrace(
        torch.arange(1, 4), torch.ones(3, 1), torch.ones(1), torch.tensor([3]), torch.tensor([False]), 1e-3
    )
    assert flat.rates.item() == 1


def test_too_short_to_fit():
    trace = traced(lambda z: 0 * z + 1, torch.zeros(2, 1), dq.Naive(), dq.Stop())
    assert trace.checks.tolist() == [1, 2]
    assert trace.rates.isnan().all()
    assert str(trace).splitlines()[1].split() == ["0", "2", "0.0e+00", "0.0e+00", "-", "yes"]


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine])
def test_a_model_against_the_iteration_written_out(make):
    lm = language_model(make(), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6))
    trace = residual_trace(lm, IDS)
    with torch.no_grad():
        backbone = lm.model.backbone
        inputs = backbone.prepare(lm.embedding(IDS))
        z = torch.zeros(3, 6, 8, dtype=torch.float64)
        for check in range(4):
            after = backbone(z, inputs)[0]
            residual = ((after - z).norm(dim=-1) / after.norm(dim=-1)).amax(dim=1)
            assert torch.allclose(trace.residual[check], residual, rtol=1e-9)
            z = after
    assert trace.rtol == 1e-6 and trace.converged.all()


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Relaxed(0.8), dq.Relaxed(0.5)], ids=str)
def test_the_rate_of_one_token_is_the_damped_spectral_radius(solver):
    """Two independent ways to one number: the fall of the residual, and an eigenvalue."""
    torch.manual_seed(0)
    backbone = dq.Affine(8).double()
    backbone.A.data = torch.diag(torch.linspace(-0.3, 0.85, 8, dtype=torch.float64))
    lm = language_model(backbone, solver=solver)
    rates = residual_trace(lm, IDS[:, :1]).rates
    damping = getattr(solver, "damping", 1.0)
    assert torch.allclose(rates, model_spectral_radius(lm, IDS[:, :1]).damped(damping)[:, 0], rtol=0.01)


def test_tokens_and_padding():
    lm = language_model(contractive_mamba2())
    mask = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    for side in (mask, mask.flip(1)):
        trace = residual_trace(lm, IDS, mask=side, per="token")
        assert trace.residual.shape[1:] == (3, 6)
        assert torch.equal(trace.residual.isnan().all(dim=0), ~side)
        assert torch.equal(trace.rates.isnan(), ~side)
        assert "nan" not in str(trace) and trace.converged.all()
        last = trace.residual[-1].nan_to_num(nan=0)
        assert (last <= 1e-11).all()


def test_outside_solvers_keep_their_trace():
    from deqseq.integrations.torchdeq import TorchDEQ

    lm = language_model(affine(), stop=dq.Stop(rtol=1e-6))
    trace = residual_trace(lm, IDS, solver=TorchDEQ("anderson"))
    assert trace.converged.all() and len(trace.checks) == len(trace.residual)


def test_the_mode_stays_and_decides_nothing():
    lm = language_model(contractive_mamba2(dropout=0.5)).train()
    lm.model.eval_solve = dq.SolveConfig(stop=dq.Stop(rtol=1e-3))
    lm.model.backbone.layers[0].eval()
    before = [part.training for part in lm.modules()]
    first, again = residual_trace(lm, IDS), residual_trace(lm, IDS)
    assert first.rtol == 1e-3
    assert torch.equal(first.residual, again.residual)
    assert [part.training for part in lm.modules()] == before


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments():
    lm = language_model(affine())
    with pytest.raises(ValueError, match="solve with trace=True"):
        ResidualTrace.of(dq.solve(torch.cos, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop()), dq.Stop())
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        residual_trace(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)
    with pytest.raises(ValueError, match="ids must be int64"):
        residual_trace(lm, IDS[:0])
    with pytest.raises(ValueError, match=r'Stop.norm must be "max_token"'):
        residual_trace(lm, IDS, stop=dq.Stop(norm="frobenius"), per="token")
    with pytest.raises(ValueError, match="per must be one of"):
        residual_trace(lm, IDS, per="tokens")
    solution = dq.solve(torch.cos, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop(), trace=True)
    for name, arguments in (("solved", (solution.value, dq.Stop())), ("stop", (solution, 1e-3))):
        with pytest.raises(TypeError, match=f"{name} must be"):
            ResidualTrace.of(*arguments)


@pytest.mark.parametrize("per", ["row", "token"])
def test_drawn_on_a_log_axis_with_the_tolerance(per):
    trace = residual_trace(language_model(contractive_mamba2()), IDS, per=per)
    axis = trace.plot().axes[0]
    assert axis.get_yscale() == "log"
    assert len(axis.get_lines()) == (4 if per == "row" else 19)
    line = axis.get_lines()[0]
    expected = trace.residual[:, 0] if per == "row" else trace.residual[:, 0, 0]
    assert torch.allclose(torch.tensor(line.get_ydata())[:5], expected[:5])
    assert axis.get_lines()[-1].get_ydata()[0] == 1e-11
