"""The residual, worked out by hand."""

import pytest
import torch

from deqseq import Stop
from deqseq.norms import measure, token_norms

Z = torch.zeros(2, 2, 2)
FZ = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [0.0, 0.0]]])
START = torch.tensor([[[0.0, 0.0], [0.0, 0.5]], [[6.0, 7.0], [0.0, 0.0]]])


@pytest.mark.parametrize(
    ("shape", "tokens"), [((6,), 1), ((6, 5), 1), ((6, 4, 5), 4), ((6, 2, 3, 5), 6), ((6, 1, 1), 1)]
)
def test_tokens_are_all_but_the_last_dimension(shape, tokens):
    x = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    norms = token_norms(x)
    expected = x.abs().reshape(6, 1) if len(shape) == 1 else x.square().sum(-1).sqrt().reshape(6, tokens)
    torch.testing.assert_close(norms, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("dtype", "accumulated"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("shape", [(3,), (3, 1000)])
def test_half_precision_accumulates_in_float32(dtype, accumulated, shape):
    """Squares of 300 overflow float16, and a thousand of them lose digits in bfloat16."""
    norms = token_norms(torch.full(shape, 300.0, dtype=dtype))
    assert norms.dtype == accumulated
    expected = 300.0 * (1 if len(shape) == 1 else 1000**0.5)
    torch.testing.assert_close(norms, torch.full((3, 1), expected, dtype=accumulated), rtol=1e-6, atol=0)


def test_per_token():
    seen = measure(START, FZ, Stop(rtol=0.1, per="token"))
    torch.testing.assert_close(seen.residual, torch.tensor([[1.0, 0.5], [0.1, 0.0]]))
    assert seen.passed.tolist() == [[False, False], [True, True]]
    torch.testing.assert_close(seen.difference, torch.tensor([5.0, 1.0]))
    torch.testing.assert_close(seen.scale.amax(dim=1), torch.tensor([5.0, 10.0]))


def test_per_row_takes_the_worst_token():
    seen = measure(START, FZ, Stop(rtol=0.1))
    torch.testing.assert_close(seen.residual, torch.tensor([1.0, 0.1]))
    assert seen.passed.tolist() == [False, True]


def test_a_row_whose_worst_token_is_not_its_largest_does_not_pass():
    """A whole-row norm would pass it: the token that still moves weighs little."""
    z = torch.tensor([[[100.0], [0.0]]])
    fz = torch.tensor([[[100.0], [1.0]]])
    assert measure(z, fz, Stop(rtol=0.1)).passed.tolist() == [False]
    assert measure(z, fz, Stop(rtol=0.1)).residual.tolist() == [1.0]
    assert measure(z, fz, Stop(rtol=0.1, norm="frobenius")).passed.tolist() == [True]


def test_frobenius_is_one_norm_over_the_row():
    seen = measure(START, FZ, Stop(rtol=0.1, norm="frobenius"))
    torch.testing.assert_close(seen.difference, torch.tensor([25.25, 1.0]).sqrt())
    torch.testing.assert_close(seen.scale[:, 0], torch.tensor([26.0, 100.0]).sqrt())
    torch.testing.assert_close(seen.residual, seen.difference / seen.scale[:, 0])


@pytest.mark.parametrize(
    ("norm", "residual"), [("max_token", 1.0), ("frobenius", (26.25 / 126) ** 0.5)], ids=["max", "frobenius"]
)
def test_per_batch_gives_every_row_the_verdict_of_all(norm, residual):
    seen = measure(START, FZ, Stop(rtol=0.9, per="batch", norm=norm))
    torch.testing.assert_close(seen.residual, torch.tensor([residual, residual]))
    assert seen.passed.tolist() == [residual <= 0.9] * 2
    assert seen.difference.shape == (2,)
    assert seen.difference[0] == seen.difference[1]
    assert torch.equal(seen.scale[0], seen.scale[1])


def test_per_batch_needs_memory_for_one_batch_only():
    """Numbers of all rows for each row grow with the square of the batch: gigabytes at 1024 rows."""
    largest = []

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_contiguous():
                largest.append(result.numel())
            return result

    batch, tokens = 64, 8
    with Largest():
        measure(torch.zeros(batch, tokens, 2), torch.ones(batch, tokens, 2), Stop(per="batch"))
    assert max(largest) <= 2 * batch * tokens


@pytest.mark.parametrize("per", ["batch", "row", "token"])
def test_the_absolute_tolerance_adds_to_the_relative_one(per):
    z, fz = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    for atol, passes in ((4.4, False), (4.6, True)):
        assert measure(z, fz, Stop(rtol=0.1, atol=atol, per=per)).passed.all().item() is passes


def test_zero_stays_zero_and_passes_without_tolerance():
    seen = measure(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), Stop(rtol=0.0))
    assert seen.passed.tolist() == [True]
    assert seen.residual.tolist() == [0.0]


def test_a_value_of_zero_that_came_from_elsewhere_does_not_pass():
    seen = measure(torch.ones(1, 3, 2), torch.zeros(1, 3, 2), Stop())
    assert seen.passed.tolist() == [False]
    assert seen.residual.item() > 1e30


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("per", ["row", "token"])
def test_a_value_that_is_not_finite_never_passes(bad, per):
    fz = FZ.clone()
    fz[1, 0, 1] = bad
    seen = measure(Z, fz, Stop(rtol=10.0, per=per))
    assert seen.passed.reshape(2, -1)[0].all().item() is True
    assert seen.passed.reshape(2, -1)[1, 0].item() is False


def test_leaves_no_graph():
    seen = measure(Z.clone().requires_grad_(), FZ, Stop())
    assert not any(number.requires_grad for number in (seen.residual, seen.difference, seen.scale))
