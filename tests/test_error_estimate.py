"""The estimated error of a value, against the true one where the fixed point is known."""

from dataclasses import replace

import pytest
import torch

import deqseq as dq
from deqseq.norms import error_estimate, token_norms

SWEEPS = [dq.Simultaneous(), dq.Chunked(2), dq.Sequential(), dq.Sliding(3)]


def halving(z):
    """Contracts by 0.9 towards 10: residual 1e-2 there means an error of 9e-2."""
    return 0.9 * z + 1


def true_error(value, wanted):
    return token_norms(value - wanted) / token_norms(value)


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_it_is_exact_for_a_scalar_linear_map(damping):
    """``f(z) - z*`` is 0.9 of ``z - z*``, whatever the damping; the estimate is that of ``z``, and for a damped
    iteration larger by one over the damping."""
    z0 = torch.zeros(3, 1, dtype=torch.float64)
    solution = dq.solve(halving, z0, solver=dq.Relaxed(damping), stop=dq.Stop(rtol=1e-3, max_steps=500))
    true = true_error(solution.value, torch.full_like(z0, 10.0))[:, 0]
    torch.testing.assert_close(solution.stats.error, true / 0.9 / damping, rtol=0.02, atol=0)
    assert bool((solution.stats.residual < 0.2 * true).all())


@pytest.mark.parametrize("damping", [1.0, 0.5])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("per", ["batch", "row", "token"])
@pytest.mark.parametrize("tolerances", [{"rtol": 1e-3}, {"rtol": 1e-3, "atol": 1e-3}])
def test_a_tolerance_of_the_error_bounds_the_error(damping, every, per, tolerances):
    slopes = torch.tensor([0.5, 0.9, -0.5, 0.95], dtype=torch.float64)[:, None, None]
    z0 = torch.zeros(4, 2, 1, dtype=torch.float64)
    stop = dq.Stop(**tolerances, max_steps=3000, check_every=every, per=per, of="error")
    solution = dq.solve(lambda z, s: s * z + 1, z0, args=slopes, solver=dq.Relaxed(damping), stop=stop)
    assert bool(solution.converged.all())
    allowed = stop.rtol + stop.atol / solution.value.abs()[..., 0]
    error = true_error(solution.value, 1 / (1 - slopes))
    assert bool((error <= allowed).all())
    if per != "batch":
        loose = dq.solve(lambda z, s: s * z + 1, z0, args=slopes, solver=dq.Relaxed(damping),
                         stop=dq.Stop(**tolerances, max_steps=3000, check_every=every, per=per))  # fmt: skip
        assert bool((true_error(loose.value, 1 / (1 - slopes))[3] > allowed[3]).all())


def test_one_check_says_nothing():
    solution = dq.solve(halving, torch.zeros(2, 1), solver=dq.Naive(), stop=dq.Stop(max_steps=1))
    assert solution.stats.error.tolist() == [torch.inf, torch.inf]
    exact = dq.solve(
        lambda z: z, torch.zeros(2, 1), solver=dq.Naive(), stop=dq.Stop(of="error")
    )  # the start is a fixed point
    assert exact.stats.error.tolist() == [0.0, 0.0]
    assert bool(exact.converged.all())


def test_a_value_of_an_earlier_check_has_no_estimate():
    """A limit cycle ends with its best value; the residual rose after it."""
    solution = dq.solve(lambda z: -1.5 * z + 1, torch.zeros(2, 1), solver=dq.Naive(), stop=dq.Stop(max_steps=8))
    assert solution.stats.error.tolist() == [torch.inf, torch.inf]
    sizes = iter((10.0, 0.1, 5.0, 3.0))  # the best value is the second; after it the residual rises, and falls again
    jumps = dq.solve(
        lambda z: z + next(sizes), torch.full((1, 1), 100.0), solver=dq.Naive(), stop=dq.Stop(1e-6, max_steps=4)
    )
    assert jumps.stats.residual.item() == pytest.approx(0.1 / 110.1, rel=1e-4)
    assert jumps.stats.error.tolist() == [torch.inf]


def test_rows_that_leave_early_keep_theirs():
    slopes = torch.tensor([0.1, 0.2, 0.1, 0.9], dtype=torch.float64)[:, None]
    call = {"solver": dq.Naive(), "stop": dq.Stop(rtol=1e-4, max_steps=500)}
    whole = dq.solve(lambda z, s: s * z + 1, torch.zeros(4, 1, dtype=torch.float64), args=slopes, **call)
    for row in range(4):
        alone = dq.solve(
            lambda z, s: s * z + 1, torch.zeros(1, 1, dtype=torch.float64), args=slopes[row : row + 1], **call
        )
        assert alone.stats.error.item() == whole.stats.error[row].item()


@pytest.mark.parametrize("every", [1, 3])
def test_frozen_tokens_keep_their_rate(every):
    """A token that waits for another at a fixed place is as far from its fixed point as when it came there."""
    slopes = torch.tensor([[[0.3], [0.97]]], dtype=torch.float64)
    stop = dq.Stop(rtol=1e-3, max_steps=900, per="token", check_every=every)
    for of in ("residual", "error"):
        solution = dq.solve(lambda z, s: s * z + 1, torch.zeros(1, 2, 1, dtype=torch.float64), args=slopes,
                            solver=dq.Naive(), stop=replace(stop, of=of))  # fmt: skip
        assert bool(solution.converged.all())
        true = true_error(solution.value, 1 / (1 - slopes))
        torch.testing.assert_close(solution.stats.error, true / slopes[..., 0], rtol=0.05, atol=0)
    alone = dq.solve(lambda z: 0.97 * z + 1, torch.zeros(1, 1, dtype=torch.float64), solver=dq.Naive(),
                     stop=replace(stop, per="row", of="error"))  # fmt: skip
    assert solution.stats.evaluations == alone.stats.evaluations


def test_tokens_that_depend_on_each_other_converge_as_rows_do():
    lm, ids = dq.load_example("parity"), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1]])
    rows, tokens = (lm(ids, stop=dq.Stop(1e-2, max_steps=300, of="error", per=per)) for per in ("row", "token"))
    assert bool(rows.converged.all() & tokens.converged.all())
    assert tokens.stats.evaluations <= 2 * rows.stats.evaluations


@torch.no_grad()
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_every_sweep_estimates_and_bounds_it(sweep, padded):
    torch.manual_seed(3)
    model = dq.ImplicitModel(dq.Affine(4)).double().eval()
    x, mask = torch.randn(3, 7, 4, dtype=torch.float64), torch.ones(3, 7, dtype=torch.bool)
    mask[0, :3] = not padded
    stop = dq.Stop(rtol=1e-3, max_steps=2000, of="error")
    output = model(x, mask=mask, sweep=sweep, stop=stop)
    tight = model(x, mask=mask, stop=dq.Stop(rtol=1e-12, max_steps=2000))
    assert bool(output.converged.all() & tight.converged.all())
    error = output.stats.error
    assert error.shape == output.stats.residual.shape
    estimates = error if error.ndim == 1 else error[mask]
    assert bool((estimates <= stop.rtol).all() & (estimates > 0).all())
    assert float(true_error(output.value, tight.value)[mask].max()) < 3 * stop.rtol


def test_a_window_goes_on_with_the_rates_of_the_tokens_that_stay():
    """A token that has been in the window needs no second check after the window has moved."""
    model = dq.ImplicitModel(dq.Affine(4)).eval()
    x = torch.ones(1, 6, 4)
    stop = dq.Stop(rtol=1e-2, max_steps=500)
    plain, bounded = (model(x, sweep=dq.Sliding(6), stop=s) for s in (stop, dq.Stop(1e-2, max_steps=500, of="error")))
    assert plain.stats.error.shape == (1, 6)
    assert bool(plain.stats.error.isfinite().all())
    assert bounded.stats.evaluations <= 2 * plain.stats.evaluations


def test_it_is_no_bound_with_a_solver_whose_residual_falls_irregularly():
    slopes = torch.tensor([0.95, 0.5], dtype=torch.float64)
    z0, stop = torch.zeros(1, 1, 2, dtype=torch.float64), dq.Stop(rtol=1e-2, max_steps=500)
    solution = dq.solve(lambda z: slopes * z + 1, z0, solver=dq.Anderson(), stop=stop)
    assert solution.stats.error[0] < true_error(solution.value, 1 / (1 - slopes))[0, 0]


def test_closed_form():
    residual, before = torch.tensor([0.01, 0.01, 0.0, 0.01]), torch.tensor([0.04, 0.01, 0.0, torch.nan])
    for every, first in ((1, 0.04 / 3), (2, 0.02)):
        error = error_estimate(residual, before, dq.Stop(check_every=every))
        torch.testing.assert_close(error, torch.tensor([first, torch.inf, 0, torch.inf]))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    with pytest.raises(ValueError, match=r"Stop\.of.*'errors'"):
        dq.Stop(of="errors")
    with pytest.raises(ValueError, match=r"Stop\.of"):
        dq.Stop(of="error", exit=dq.StableArgmax())


def test_it_is_told():
    lm = dq.load_example("parity")
    ids = torch.tensor([[1, 0, 1, 1, 0, 1]])
    output = lm(ids, stop=dq.Stop(rtol=1e-4, max_steps=200))
    assert f"Estimated relative error: {output.stats.error.max():.0e}." in str(output.explain())
