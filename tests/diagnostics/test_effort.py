"""Iterations of each token, for a map along which information moves one token per iteration."""

import pytest
import torch
from small_models import contractive_mamba2, language_model

import deqseq as dq
from deqseq.diagnostics import token_effort

IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def shift_model() -> dq.CausalLM:
    """z_t = z_{t-1} + x_t: a token is exact once the one before is, and passes at the evaluation after that."""
    torch.manual_seed(0)
    backbone = dq.Affine(4)
    backbone.A.data.zero_()
    backbone.R.data = torch.eye(4)
    return language_model(backbone, solver=dq.Naive())


@pytest.mark.parametrize(
    ("sweep", "steps"),
    [
        (dq.Simultaneous(), [7, 7, 7, 7, 7, 7]),
        (dq.Sequential(), [2, 2, 2, 2, 2, 2]),
        (dq.Chunked(3), [4, 4, 4, 4, 4, 4]),
        (dq.Sliding(3), [2, 4, 4, 4, 2, 3]),  # it moves after evaluations 2, 4 and 6, and ends at 7
    ],
    ids=str,
)
def test_a_token_is_done_one_iteration_after_the_one_before(sweep, steps):
    report = token_effort(shift_model(), IDS, sweep=sweep)
    assert report.iterations.tolist() == [steps, steps]
    assert report.sweep == sweep and report.converged.all()
    assert report.mean == pytest.approx(sum(steps) / 6)


def test_tokens_are_solved_one_by_one_unless_a_sweep_says_otherwise():
    lm = shift_model()
    chunks = dq.SolveConfig(sweep=dq.Chunked(3))
    assert token_effort(lm, IDS).sweep == dq.Sequential()
    assert token_effort(lm, IDS, solve=chunks).sweep == dq.Chunked(3)
    assert token_effort(lm, IDS, solve=chunks, sweep=dq.Simultaneous()).sweep == dq.Simultaneous()


def test_padding_is_left_out():
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    for sweep in (dq.Simultaneous(), dq.Sliding(3)):
        report = token_effort(language_model(contractive_mamba2()), IDS, mask=mask, sweep=sweep)
        assert torch.equal(report.mask, mask)
        real = [report.iterations[0, t].item() for t in range(2, 6)] + report.iterations[1].tolist()
        assert report.mean == pytest.approx(sum(real) / 10)
    alone = token_effort(language_model(contractive_mamba2()), IDS[:1, 2:])
    both = token_effort(language_model(contractive_mamba2()), IDS, mask=mask)
    assert both.iterations[0, 2:].tolist() == alone.iterations[0].tolist()


def test_text_has_the_numbers_under_the_tokens():
    mask = torch.arange(20).flip(0) < torch.tensor([[20], [3]])
    text = str(token_effort(shift_model(), torch.zeros(2, 20, dtype=torch.int64), mask=mask)).splitlines()
    assert text[0] == "Sequential(): 2.0 iterations per token, at most 2; 100% of rows converged"
    assert text[-3] == "row 1"  # without padding
    assert text[-2].split() == ["17", "18", "19"] and text[-1].split() == ["2", "2", "2"]
    assert len(text[-2]) == len(text[-1])
