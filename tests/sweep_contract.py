"""What every sweep must do: find the fixed point, commit each token once, and count."""

from dataclasses import FrozenInstanceError, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from deqseq.backbones import Affine
from deqseq.config import SolveConfig
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom
from deqseq.models import ImplicitModel, ModelOutput
from deqseq.solution import Status
from deqseq.solvers import Anderson, Broyden, Naive, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.testing.problems import seeded

TIGHT = Stop(rtol=1e-10, max_steps=500)
WIDTH = 6


class SweepContract:
    """The suite for a sweep: subclass it as ``TestName``, and set ``sweep``.

    It solves :class:`deqseq.Affine`, whose fixed point is known, and checks values, statistics, caches, gradients,
    padding, and rows and budgets that fail.

    Attributes:
        sweep: the sweep.

    Example:
        >>> import deqseq as dq
        >>> class TestChunked(SweepContract):
        ...     sweep = dq.Chunked(3)
    """

    sweep: ClassVar[Sweep]

    def model(self, **fields: Any) -> ImplicitModel:
        """A small model that is solved by the sweep."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            backbone = Affine(WIDTH).double()
        return ImplicitModel(backbone, replace(SolveConfig(stop=TIGHT, sweep=self.sweep), **fields))

    def x(self, batch: int, length: int) -> Tensor:
        """Random inputs."""
        return torch.randn(batch, length, WIDTH, generator=seeded(0), dtype=torch.float64)

    def solution(self, model: Any, x: Tensor) -> Tensor:
        """The known fixed point."""
        return model.backbone.solution(x)

    def solved(self, model: ImplicitModel, x: Tensor, **options: Any) -> ModelOutput:
        with torch.no_grad():
            return model(x, **options)

    def test_it_is_its_configuration(self) -> None:
        with pytest.raises(FrozenInstanceError):
            setattr(self.sweep, next(iter(vars(self.sweep)), "window"), 3)
        assert {self.sweep: 1}[type(self.sweep)(**vars(self.sweep))] == 1

    # what it finds

    @pytest.mark.parametrize("length", [1, 2, 11])
    @pytest.mark.parametrize("start", ["zero", "input"])
    def test_finds_the_fixed_point(self, length: int, start: Any) -> None:
        model, x = self.model(start=start), self.x(3, length)
        output = self.solved(model, x)
        assert output.status is not None and output.status.tolist() == [Status.CONVERGED] * 3
        torch.testing.assert_close(output.value, self.solution(model, x), rtol=0, atol=1e-8)

    @pytest.mark.parametrize("solver", [Naive(), Relaxed(0.5), Anderson(), Broyden()], ids=str)
    @pytest.mark.parametrize("rule", [{"norm": "row"}, {"check_every": 3}, {"atol": 1e-9}], ids=str)
    def test_any_solver_and_stopping_rule(self, solver: Solver[Any], rule: dict[str, Any]) -> None:
        model, x = self.model(solver=solver, stop=replace(TIGHT, **rule)), self.x(2, 8)
        output = self.solved(model, x)
        assert bool(output.converged.all())
        torch.testing.assert_close(output.value, self.solution(model, x), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("gradient", [Phantom(4), OneStep(), Implicit(stop=TIGHT)], ids=lambda g: type(g).__name__)
    def test_gradients_are_those_of_the_whole_sequence(self, gradient: Gradient) -> None:
        model, x, found = self.model(gradient=gradient), self.x(2, 9), []
        weights = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
        for sweep in (self.sweep, Simultaneous()):
            x = x.detach().requires_grad_()
            loss = (model(x, sweep=sweep).value.square() * weights).sum()
            found.append(torch.autograd.grad(loss, [x, *model.parameters()]))
        for ours, expected in zip(*found, strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)

    # what it reports

    @pytest.mark.parametrize("return_cache", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    def test_statistics_are_per_token_and_count_what_was_computed(self, padded: bool, return_cache: bool) -> None:
        model, seen = self.model(), list[torch.Size]()
        real = torch.arange(11) < torch.tensor([11, 3, 8, 11, 1] if padded else [11] * 5)[:, None]
        model.backbone.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2]))
        stats = self.solved(model, self.x(5, 11), mask=real, return_cache=return_cache).stats
        assert stats is not None and stats.forced is not None
        assert {tokens for _, tokens in seen} == {self.sweep.width(11)}
        assert stats.evaluations == len(seen)
        assert stats.updates.sum() == sum(shape.numel() for shape in seen)
        for numbers in (stats.iterations, stats.residual, stats.updates, stats.forced):
            assert numbers.shape == (5, 11)
        assert torch.equal(stats.iterations > 0, real)
        assert bool((stats.updates >= stats.iterations).all())
        assert stats.residual.max() <= TIGHT.rtol
        assert not bool(stats.forced.any())

    def test_a_budget_that_is_too_small_is_reported(self) -> None:
        mask = torch.arange(9) < torch.tensor([[9], [4]])
        output = self.solved(self.model(stop=Stop(rtol=1e-13, max_steps=2)), self.x(2, 9), mask=mask)
        assert output.status is not None and output.status.tolist() == [Status.MAX_STEPS_REACHED] * 2
        assert output.stats is not None
        assert torch.equal(output.stats.residual > 1e-13, mask)
        assert output.stats.forced is not None and torch.equal(output.stats.forced, mask)
        assert bool(output.value.isfinite().all())

    # what it carries on

    @pytest.mark.parametrize("first", [1, 4, 10])
    def test_a_sequence_continued_from_its_cache_is_the_sequence(self, first: int) -> None:
        model, x = self.model(), self.x(3, 11)
        whole = self.solved(model, x, sweep=Simultaneous(), return_cache=True)
        left = self.solved(model, x[:, :first], return_cache=True)
        right = self.solved(model, x[:, first:], cache=left.cache, return_cache=True)
        torch.testing.assert_close(torch.cat([left.value, right.value], dim=1), whole.value, rtol=0, atol=1e-8)
        assert right.cache is not None and whole.cache is not None
        for ours, expected in zip(right.cache.tensors(), whole.cache.tensors(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-8)

    def test_keeping_the_cache_takes_no_evaluation(self) -> None:
        outputs = [self.solved(self.model(), self.x(4, 9), return_cache=keep) for keep in (False, True)]
        evaluations = [output.stats.evaluations for output in outputs if output.stats is not None]
        assert evaluations[0] == evaluations[1]
        assert [output.cache is None for output in outputs] == [True, False]

    # rows

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_padded_row_is_the_row_alone(self, side: str) -> None:
        model, x = self.model(), self.x(3, 9)
        mask = torch.arange(9) < torch.tensor([9, 1, 5])[:, None]
        mask = mask.flip(1) if side == "left" else mask
        together = self.solved(model, x, mask=mask)
        assert together.value[~mask].abs().max() == 0
        for row, real in enumerate(mask):
            alone = self.solved(model, x[row : row + 1, real])
            torch.testing.assert_close(together.value[row, real], alone.value[0], rtol=0, atol=1e-8)

    @pytest.mark.parametrize("check_every", [1, 3])
    def test_a_row_that_diverges_leaves_the_others_alone(self, check_every: int) -> None:
        model, x = self.model(stop=replace(TIGHT, check_every=check_every)), self.x(3, 12)
        x[1, 5] = torch.inf
        output = self.solved(model, x)
        assert output.status is not None
        assert output.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
        assert bool(output.value.isfinite().all())
        assert output.stats is not None
        assert output.stats.forced is not None
        assert output.stats.forced.any(dim=1).tolist() == [False, True, False]
        for row in (0, 2):
            alone = self.solved(model, x[row : row + 1])
            torch.testing.assert_close(output.value[row], alone.value[0], rtol=0, atol=1e-8)
