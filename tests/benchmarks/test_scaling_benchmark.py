"""The benchmark of growing sizes: its exponents, its memory, and that every work of it runs."""

import sys
from pathlib import Path

import pytest
import torch

import deqseq as dq

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import scaling


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.5])
def test_the_slope_of_a_power_is_its_exponent(exponent):
    sizes = (16, 64, 1024)
    assert scaling.slope(sizes, [3 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_the_exponent_of_ours_is_judged_beside_the_block():
    sizes, linear = (2, 4, 8), {"ours": [0.1, 0.1], scaling.BY_HAND: [0.1, 0.1]}
    seconds = [{name: [size * each for each in times] for name, times in linear.items()} for size in sizes]
    quadratic = [
        times | {"ours": [size * each for each in times["ours"]]} for size, times in zip(sizes, seconds, strict=True)
    ]
    for times, holds in ((seconds, True), (quadratic, False)):
        curve = scaling.Curve(times, [1.0, 1.0, 1.0], [5.0, 5.0, 5.0])
        found = list(scaling.exponents("Llama, Sliding, batch", "Sliding", "batch", sizes, curve))
        assert (found[0].metric, found[0].goal) == ("exponent of seconds", None)
        assert (found[1].metric, found[1].holds) == ("exponent above the block's", holds)
        steady = next(scaling.exponents("Mamba2, Sliding, length", "Sliding", "length", sizes, curve))
        assert (steady.goal, steady.holds) == ("ours <= 1.05", holds)
        assert [row.ours for row in found[2:]] == pytest.approx([0.0, 0.0])


def test_held_counts_the_tensors_of_records():
    output = dq.ImplicitModel(dq.Affine(4))(torch.zeros(2, 3, 4))
    assert scaling.held(output) >= output.value.nbytes + output.stats.residual.nbytes
    assert scaling.held((torch.zeros(2), [torch.zeros(3)], "text")) == 20


@pytest.mark.parametrize("sweep", ["Sliding", "Sequential"])
def test_the_memory_of_a_swept_solve_does_not_grow_with_the_length(sweep):
    """Of 192 more tokens, the states alone take 192 times 256 bytes."""
    short, long = (
        scaling.Case("Mamba2", scaling.Size(length=n)).solver_memory(scaling.SWEEPS[sweep]) for n in (64, 256)
    )
    assert long - short < 192 * 64


@pytest.mark.parametrize("kind", ["Mamba2", "Llama"])
def test_blocks_contract_and_every_work_runs(kind):
    case = scaling.Case(kind, scaling.Size(length=12, width=32, blocks=2))
    for sweep in scaling.SWEEPS.values():
        assert case.solve(sweep).converged.all()
    for runs in case.works().values():
        for run in runs.values():
            run()
