"""Residual traces against maps whose rates are known, and iterations written out."""

import copy

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
    checks = []
    return ResidualTrace.of(dq.solve(f, z0, solver=solver, stop=stop, callback=checks.append), checks)


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
        trace = ResidualTrace(checks, 2 ** height[:, None], checks[-1:], torch.tensor([True]), 1e-3)
        assert trace.rates.item() == pytest.approx(0.5 ** (1 / int(checks[0])))
    flat = ResidualTrace(torch.arange(1, 4), torch.ones(3, 1), torch.tensor([3]), torch.tensor([False]), 1e-3)
    assert flat.rates.item() == 1


def test_too_short_to_fit():
    trace = traced(lambda z: 0 * z + 1, torch.zeros(2, 1), dq.Naive(), dq.Stop())
    assert trace.checks.tolist() == [1, 2]
    assert trace.rates.isnan().all()
    assert str(trace).splitlines()[1].split() == ["0", "2", "0.0e+00", "-", "yes"]


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


def test_padding_has_no_say():
    lm = language_model(contractive_mamba2())
    mask = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    for side in (mask, mask.flip(1)):
        trace = residual_trace(lm, IDS, mask=side)
        for row in range(3):
            alone = residual_trace(lm, IDS[row : row + 1, side[row]])
            count = int(alone.iterations)
            assert trace.iterations[row] == count and trace.converged[row]
            assert torch.allclose(trace.residual[:count, row], alone.residual[:, 0], rtol=1e-3)


def test_rows_that_have_left_the_batch_keep_their_last_residual():
    gains = torch.tensor([[0.1], [0.1], [0.9]], dtype=torch.float64)
    checks, stop = [], dq.Stop(rtol=1e-6, max_steps=500)
    solution = dq.solve(lambda z, g: g * z + 1, torch.zeros(3, 1, dtype=torch.float64), args=gains,
                        solver=dq.Naive(), stop=stop, callback=checks.append)  # fmt: skip
    trace = ResidualTrace.of(solution, checks)
    assert trace.residual.shape == (trace.iterations.max(), 3)
    assert torch.equal(trace.residual[-1], solution.stats.residual)
    assert trace.rates.tolist() == pytest.approx([0.1, 0.1, 0.9], rel=0.01)


def test_of_a_solver_of_another_library_there_is_one_check():
    class TheirLoop(dq.ExternalSolver):
        def run(self, f, z0, stop):
            return [z0 := f(z0) for _ in range(stop.max_steps - 1)][-1]

    trace = residual_trace(language_model(affine()), IDS, solver=TheirLoop(), stop=dq.Stop(rtol=1e-6, max_steps=200))
    assert trace.checks.tolist() == [200] and trace.iterations.tolist() == [200] * 3
    assert trace.converged.all() and trace.rates.isnan().all()


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
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        residual_trace(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)
    with pytest.raises(ValueError, match="ids must be int64"):
        residual_trace(lm, IDS[:0])
    with pytest.raises(TypeError, match="leave out sweep"):
        residual_trace(lm, IDS, sweep=dq.Sequential())
    checks = []
    solution = dq.solve(torch.cos, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop(), callback=checks.append)
    for given in ((solution, []), (copy.copy(solution), checks), (dq.take(solution, torch.tensor([0])), checks)):
        with pytest.raises(ValueError, match=r"callback=checks\.append"):
            ResidualTrace.of(*given)
    for name, given in (("solved", (solution.value, checks)), ("checks", (solution, 1)), ("checks", (solution, [1]))):
        with pytest.raises(TypeError, match=f"{name} must be"):
            ResidualTrace.of(*given)


def test_drawn_on_a_log_axis_with_the_tolerance():
    trace = residual_trace(language_model(contractive_mamba2()), IDS)
    axis = trace.plot().axes[0]
    assert axis.get_yscale() == "log"
    assert len(axis.get_lines()) == 4
    assert torch.allclose(torch.tensor(axis.get_lines()[0].get_ydata())[:5], trace.residual[:5, 0])
    assert axis.get_lines()[-1].get_ydata()[0] == 1e-11
