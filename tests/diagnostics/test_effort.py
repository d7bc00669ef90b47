"""Iterations of each token, for a map along which information moves one token per iteration."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.diagnostics import token_effort

IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def shift_model() -> dq.CausalLM:
    """z_t = z_{t-1} + x_t: a token is exact once the one before is, and passes at the evaluation after that."""
    torch.manual_seed(0)
    backbone = dq.Affine(4)
    backbone.A.data.zero_()
    backbone.R.data = torch.eye(4)
    return dq.CausalLM(11, dq.ImplicitModel(backbone, dq.SolveConfig(solver=dq.Naive())), embedding_std=1.0).double()


def random_model(backbone) -> dq.CausalLM:
    torch.manual_seed(1)
    return dq.CausalLM(11, dq.ImplicitModel(backbone), embedding_std=1.0).double()


@pytest.mark.parametrize(
    ("sweep", "steps"),
    [
        (dq.Simultaneous(), [2, 3, 4, 5, 6, 7]),
        (dq.Sequential(), [2, 2, 2, 2, 2, 2]),
        (dq.Chunked(3), [2, 3, 4, 2, 3, 4]),
        (dq.Sliding(3), [2, 4, 4, 4, 2, 3]),  # it moves after evaluations 2, 4 and 6, and ends at 7
    ],
    ids=str,
)
def test_a_token_is_done_one_iteration_after_the_one_before(sweep, steps):
    report = token_effort(shift_model(), IDS, sweep=sweep)
    assert report.iterations.tolist() == [steps, steps]
    assert report.converged.all()
    assert report.most == max(steps)
    assert report.mean == pytest.approx(sum(steps) / 6)
    together = {dq.Simultaneous(): [7] * 6, dq.Chunked(3): [4] * 6}
    assert report.updates.tolist() == [together.get(sweep, steps)] * 2
    assert report.token_updates == report.updates.sum()


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
def test_tokens_solved_together_pass_for_good(make):
    """Against the iteration written out: after its steps a token's residual stays below the tolerance."""
    lm = random_model(make())
    stop = dq.Stop(rtol=1e-4, per="token")
    report = token_effort(lm, IDS, solver=dq.Naive(), stop=dq.Stop(rtol=1e-4))
    with torch.no_grad():
        output = lm.eval().model(lm.embedding(IDS), solver=dq.Naive(), stop=stop, trace=True)
    passed = output.stats.trace <= 1e-4
    for row in range(2):
        for token in range(6):
            history = passed[: report.iterations[row].max(), row, token].tolist()
            first = max(i + 1 for i, ok in enumerate([False, *history[:-1]]) if not ok)
            assert report.iterations[row, token] == first


def test_padding_is_left_out():
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    for sweep in (dq.Simultaneous(), dq.Sliding(3)):
        report = token_effort(random_model(contractive_mamba2()), IDS, mask=mask, sweep=sweep)
        assert torch.equal(report.mask, mask)
        real = [report.iterations[0, t].item() for t in range(2, 6)] + report.iterations[1].tolist()
        assert report.mean == pytest.approx(sum(real) / 10)
        assert report.most == max(real)
    alone = token_effort(random_model(contractive_mamba2()), IDS[:1, 2:])
    both = token_effort(random_model(contractive_mamba2()), IDS, mask=mask)
    assert both.iterations[0, 2:].tolist() == alone.iterations[0].tolist()


def test_text_has_the_numbers_under_the_tokens():
    report = token_effort(shift_model(), IDS, decode=lambda i: f"w{i}" if i != IDS[0, 0] else "\n$")
    lines = str(report).splitlines()
    assert lines[0] == "Simultaneous(): 4.5 iterations per token, at most 7"
    assert lines[1] == "84 token updates, 100% of rows converged"
    assert lines[2] == "row 0"
    assert lines[3].split()[0] == "\\n$"
    assert lines[4].split() == ["2", "3", "4", "5", "6", "7"]
    assert len(lines[3]) == len(lines[4])


def test_long_and_many_rows_are_cut():
    ids = torch.zeros(10, 80, dtype=torch.int64)
    text = str(token_effort(shift_model(), ids, sweep=dq.Sequential()))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("...") == 17  # two per row, and one for the rows
    assert text.endswith("... and 2 more rows")


def test_padding_is_not_printed():
    mask = torch.arange(20).flip(0) < torch.tensor([[20], [3]])
    text = str(token_effort(shift_model(), torch.zeros(2, 20, dtype=torch.int64), mask=mask))
    assert text.splitlines()[-2].split() == ["17", "18", "19"] and text.splitlines()[-1].split() == ["2", "3", "4"]


def test_drawn_as_a_map():
    mask = torch.tensor([[True] * 6, [True] * 5 + [False]])
    values = token_effort(shift_model(), IDS, mask=mask).plot().axes[0].images[0].get_array()
    assert values[0].tolist() == [2, 3, 4, 5, 6, 7] and values[1].tolist()[:5] == [2, 3, 4, 5, 6] and values.mask[1, 5]


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments():
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        token_effort(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.10"):
        token_effort(shift_model(), torch.tensor([[0, 11]]))
    with pytest.raises(ValueError, match=r'Stop.norm must be "max_token"'):
        token_effort(shift_model(), IDS, stop=dq.Stop(norm="frobenius"))
    with pytest.raises(TypeError, match="decode must be a function"):
        token_effort(shift_model(), IDS, decode="ab")
    with pytest.raises(TypeError, match=r"decode\(\d+\) must be a str"):
        token_effort(shift_model(), IDS, decode=lambda i: i)


def test_lockstep_counts_are_those_of_the_row():
    lm = dq.CausalLM(11, dq.ImplicitModel(dq.Affine(8)))
    effort = token_effort(lm, IDS, sweep=dq.Lockstep(3))
    assert effort.iterations.tolist() == [[3] * 6] * 2
    assert "3.0 iterations per token" in str(effort)
