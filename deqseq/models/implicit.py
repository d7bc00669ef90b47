"""A backbone iterated to its fixed point."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deqseq.backbones.base import Backbone, Cache, Injection, Sequence, check_sequence
from deqseq.gradients import AttachedGradient, Gradient, Phantom
from deqseq.layers.weight_norm import weights_computed_once
from deqseq.models.output import ModelOutput
from deqseq.solution import Solution, SolveStats
from deqseq.solve import Callback, solve
from deqseq.solvers import OutsideSolver, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.types import RowIndex, State


@dataclass(frozen=True)
class BackboneMap:
    """The fixed-point map of a backbone for one input and one past.

    Attributes:
        backbone: the layers.
        injection: the input, prepared.
        cache: the settled tokens before; None: nothing.

    Example:
        >>> import deqseq as dq
        >>> backbone, x = dq.Affine(4), torch.ones(3, 5, 4)
        >>> f = BackboneMap(backbone, backbone.inject(x))
        >>> dq.solve(f, torch.zeros(3, 5, 4), solver=dq.Naive(), stop=dq.Stop()).converged
        tensor([True, True, True])
    """

    backbone: Backbone[Any]
    injection: Injection
    cache: Cache | None = None

    def __call__(self, z: State, /) -> State:
        """One self-iteration, ``(batch, length, d_model)``."""
        return self.backbone(z, self.injection, self.cache)[0]

    def select(self, rows: RowIndex, /) -> "BackboneMap":
        """The same map for the named rows alone."""
        cache = None if self.cache is None else self.cache.select(rows)
        return BackboneMap(self.backbone, self.injection.select(rows), cache)

    def following(self, z: Sequence) -> Cache:
        """The cache after these tokens, once they have settled at ``z``."""
        _, cache = self.backbone(z, self.injection, self.cache, return_cache=True)
        return cache


class ImplicitModel(nn.Module):
    r"""The fixed point of a backbone as a function of its input, :math:`z^* = f_\theta(z^*, x)`.

    Any solver, stopping rule, gradient estimator and sweep can be combined; training and evaluation run the same
    code. The iteration starts at zero.

    Args:
        backbone: the map.
        solver: the algorithm.
        stop: tolerances and budget.
        gradient: the estimator.
        eval_solver: the algorithm in eval mode; None: ``solver``.
        eval_stop: tolerances and budget in eval mode; None: ``stop``.

    References:
        Schöne et al., Implicit Language Models are RNNs: Balancing Parallelization and Expressivity, ICML 2025,
        arXiv 2502.07827, section 3.

    Example:
        >>> import deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6))
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x).value, model.backbone.solution(x), atol=1e-5)
        True
        >>> model(x, sweep=dq.Sequential()).stats.steps.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        backbone: Backbone[Any],
        *,
        solver: Solver | OutsideSolver = Relaxed(0.8),
        stop: Stop = Stop(),
        gradient: Gradient = Phantom(),
        eval_solver: Solver | OutsideSolver | None = None,
        eval_stop: Stop | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.solver, self.stop, self.gradient = solver, stop, gradient
        self.eval_solver, self.eval_stop = eval_solver, eval_stop

    def forward(
        self,
        x: Sequence,
        *,
        cache: Cache | None = None,
        sweep: Sweep = Simultaneous(),
        return_cache: bool = False,
        solver: Solver | OutsideSolver | None = None,
        stop: Stop | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> ModelOutput:
        """Solve for the fixed point of ``x``.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            cache: what :class:`ModelOutput` returned for the tokens before; None: nothing came before.
            sweep: which tokens are solved together.
            return_cache: whether the cache after these tokens is wanted (one more evaluation). It carries no gradient.
            solver: instead of the model's own, for this call.
            stop: instead of the model's own, for this call.
            trace: whether to keep residuals; with the simultaneous sweep only.
            callback: called at every look at the residual; with another sweep the steps begin anew for each chunk.

        Returns:
            The states, with the numbers of their solve.

        Raises:
            ValueError: a bad shape; a trace with another sweep than the simultaneous; or a gradient of the iteration
                itself (:class:`Unrolled`) with another sweep.
        """
        check_sequence(x, self.backbone.d_model)
        solver = solver or (None if self.training else self.eval_solver) or self.solver
        stop = stop or (None if self.training else self.eval_stop) or self.stop
        gradient = self.gradient if self._wants_gradient(x) else None
        pieces = None if isinstance(sweep, Simultaneous) else sweep.chunks(x.shape[1])
        if pieces is not None:
            _check_pieces(gradient, trace, sweep)
        options: dict[str, Any] = {"solver": solver, "stop": stop, "trace": trace, "callback": callback}
        # a checkpointed backward pass computes the weights again, and must find what the forward pass did
        again = gradient is not None and gradient.recomputes
        with nullcontext() if again else weights_computed_once(self.backbone):
            return self._solve(x, cache, pieces, return_cache, gradient, options)

    def _solve(
        self,
        x: Sequence,
        cache: Cache | None,
        pieces: list[int] | None,
        return_cache: bool,
        gradient: Gradient | None,
        options: dict[str, Any],
    ) -> ModelOutput:
        whole = BackboneMap(self.backbone, self.backbone.inject(x), cache)
        z0 = torch.zeros_like(x, requires_grad=False)
        if pieces is not None:
            with torch.no_grad():
                solution, cache = _solve_pieces(whole, z0, pieces, return_cache, options)
            if isinstance(gradient, AttachedGradient):
                solution = replace(solution, value=gradient.attach_to(whole, z0, solution))
        else:
            solution = solve(whole, z0, **options) if gradient is None else gradient.apply(whole, z0, **options)
            cache = None
            if return_cache:
                with torch.no_grad():
                    cache = whole.following(solution.value)
                counted = replace(solution.stats, evaluations=solution.stats.evaluations + 1)
                solution = replace(solution, stats=counted)
        return ModelOutput(solution.value, cache, solution.stats, solution.status)

    def _wants_gradient(self, x: Sequence) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))


def _check_pieces(gradient: Gradient | None, trace: bool, sweep: Sweep) -> None:
    if gradient is not None and not isinstance(gradient, AttachedGradient):
        raise ValueError(
            f"{type(gradient).__name__} differentiates the iteration itself and needs the Simultaneous sweep, got "
            f"{sweep}: take Phantom, OneStep or Implicit, which need the fixed point alone"
        )
    if trace:
        raise ValueError(f"trace=True needs the Simultaneous sweep, got {sweep}: chunks have traces of their own")


def _solve_pieces(
    whole: BackboneMap, z0: Sequence, pieces: list[int], return_cache: bool, options: dict[str, Any]
) -> tuple[Solution, Cache | None]:
    """Solve chunk after chunk against the cache of those before, and join the solutions."""
    cache, start, solutions = whole.cache, 0, []
    for size in pieces:
        chunk = BackboneMap(whole.backbone, whole.injection.tokens(start, start + size), cache)
        solutions.append(solve(chunk, z0[:, start : start + size], **options))
        start += size
        if return_cache or start < z0.shape[1]:
            cache = chunk.following(solutions[-1].value)
    return _join(solutions, pieces, len(pieces) - (not return_cache)), cache if return_cache else None


def _join(solutions: list[Solution], pieces: list[int], commits: int) -> Solution:
    """One solution for the whole sequence, its statistics per token."""

    def per_token(name: str) -> torch.Tensor:
        columns = []
        for solution, size in zip(solutions, pieces, strict=True):
            numbers = getattr(solution.stats, name)
            columns.append(numbers[:, None].expand(-1, size) if numbers.ndim == 1 else numbers)
        return torch.cat(columns, dim=1)

    evaluations = commits + sum(solution.stats.evaluations for solution in solutions)
    stats = SolveStats(per_token("steps"), per_token("residual"), evaluations)
    status = torch.stack([solution.status for solution in solutions]).amax(dim=0)
    return Solution(torch.cat([solution.value for solution in solutions], dim=1), status, stats)
