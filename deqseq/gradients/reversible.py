"""Backpropagation through an iteration that is computed backwards instead of stored."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from deqseq.evaluate import check_start, check_transforms
from deqseq.gradients.base import Gradient
from deqseq.gradients.reversal import Reversal
from deqseq.solution import Solution, Status
from deqseq.solve import SolveCall, solve
from deqseq.solvers.base import Solver
from deqseq.solvers.coupled import Coupled
from deqseq.types import FixedPointMap, State


@dataclass(frozen=True)
class Reversible(Gradient):
    r"""Differentiate the solve itself, as :class:`Unrolled` does, in memory that hardly grows with its length.

    The solver must be :class:`Coupled`, whose iteration has an inverse:

    .. math:: z_{n-1} = \frac{z_{n+1} - \tau f(z_n)}{1 - \tau}.

    The backward pass computes the points from the last to the first, and evaluates the map once more at each, as
    ``Unrolled(checkpoint=True)`` does. The gradients are those of ``Unrolled()`` with the same solver: exact for the
    iterate that is returned, and for the start ``z0``. Diverged rows give none, unless their values are not finite,
    which makes the gradient NaN.

    The forward iteration contracts, so its inverse alone would amplify rounding errors beyond use, within about 20
    evaluations with damping 0.8. Therefore the points are float64 numbers rounded to a fixed spacing, and the three or
    four bits per number that each step loses are stored. The points come back exactly, whatever the number of
    evaluations.

    The spacing is :math:`2^{-44}` of the larger of 1 and the first size of a row, :math:`2^{-36}` where ``z0`` is not
    float64. The map is evaluated in the dtype of ``z0``. Memory is that of one evaluation, a few states in float64, and
    one more state for every 22 evaluations with damping 0.5 (17 with 0.8).

    Raises:
        ValueError: in a call, another solver, or a stopping rule per token (frozen tokens have no inverse).
        RuntimeError: in the backward pass, the points do not lead back to the start: the map gave other values when it
            was evaluated again, or the states grew hundreds of times beyond the larger of 1 and their first size.

    References:
        McCallum, Arora and Foster, Reversible Deep Equilibrium Models, 2025, arXiv 2509.12917; they take few
        evaluations and store no bits. Those are the idea of Maclaurin, Duvenaud and Adams, Gradient-based
        Hyperparameter Optimization through Reversible Learning, ICML 2015, arXiv 1502.03492.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(lambda z: a * z + 1, torch.zeros(1, 1), solver=dq.Coupled(0.8),
        ...                           stop=dq.Stop(rtol=1e-6), gradient=dq.Reversible())
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)     # d/da 1 / (1 - a)
        4.0
    """

    checkpoint: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    def apply(self, f: FixedPointMap, z0: State, **call: Unpack[SolveCall]) -> Solution:
        solver, stop = call["solver"], call["stop"]
        if not isinstance(solver, Coupled):
            raise ValueError(f"Reversible needs solver=dq.Coupled(damping), whose steps have an inverse, got {solver}")
        if stop.per == "token":
            raise ValueError('Reversible needs Stop.per="row" or "batch": tokens that are frozen have no inverse')
        if not torch.is_grad_enabled():
            return solve(f, z0, **call)
        check_transforms(("grad",))
        check_start("z0", z0)
        args, readout, has_aux = call.get("args"), call.get("readout"), call.get("has_aux", False)
        run = Reversal(f, z0, solver.damping, has_aux)

        def evaluated(z: State, tracked: Any = None) -> Any:
            own, rows = tracked or (None, None)
            if not torch.is_grad_enabled():  # explain() solves again
                fz, aux = run.evaluate(z, own)
                return (fz, aux) if has_aux else fz
            number, given, needs_gradient = run.record(z.detach(), own, rows), [z], z.requires_grad

            def evaluation(_: Tensor) -> Any:
                """The first time at the point itself; again in the backward pass, where it is computed anew."""
                again = not given
                point = run.point(number).requires_grad_(needs_gradient) if again else given.pop()
                fz, aux = run.evaluate(point, own)
                if again:
                    run.evaluated(number, fz.detach())
                return (fz, aux) if has_aux else fz

            with set_checkpoint_early_stop(False):  # the value is needed too
                return checkpoint(evaluation, run.start, use_reentrant=False)

        changes: dict[str, Any] = {"solver": _Steps(run)}
        if args is not None:
            changes["args"] = args, torch.arange(len(z0), device=z0.device)
        if readout is not None:
            changes["readout"] = lambda fz, *tracked: readout(fz.to(z0.dtype), *(own for own, _ in tracked))
        solution = solve(evaluated, z0.double(), **cast(SolveCall, {**call, **changes}))
        diverged, stats, problem = solution.status == Status.DIVERGED, solution.stats, solution.problem
        run.finish(stats.iterations - 1, diverged)
        value = solution.value
        if bool(diverged.any()):
            value = torch.where(diverged.reshape(-1, *[1] * (z0.ndim - 1)), value.detach(), value)
        kind = torch.promote_types(z0.dtype, torch.float32)
        names = ("residual", "error", *["trace"] * (stats.trace is not None))
        stats = replace(stats, **{name: getattr(stats, name).to(kind) for name in names})
        problem = None if problem is None else replace(problem, solver=solver)
        return replace(solution, value=value.to(z0.dtype), stats=stats, problem=problem)


@dataclass(frozen=True)
class _Steps(Solver[tuple[State, Tensor]]):
    """The steps of :class:`Coupled`, rounded, with what their inverse lacks recorded; and the rows they are of."""

    run: Reversal

    def init(self, z0: State) -> tuple[State, Tensor]:
        return z0, torch.arange(len(z0), device=z0.device)

    def step(self, z: State, fz: State, state: tuple[State, Tensor]) -> tuple[State, tuple[State, Tensor]]:
        before, rows = state
        after = _Step.apply(before, fz, self.run.spacing(fz.detach(), rows), self.run.damping)
        assert isinstance(after, Tensor)
        self.run.record_step(before.detach(), fz.detach(), after.detach(), rows)
        return after, (z, rows)


class _Step(torch.autograd.Function):
    """A step of :class:`Coupled` rounded to multiples of ``spacing``, with the gradient of the step itself."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, fz: Tensor, spacing: Tensor, damping: float) -> Tensor:
        ctx.damping = damping
        return torch.round((before * (1 - damping) + fz * damping) / spacing) * spacing

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        return grad * (1 - ctx.damping), grad * ctx.damping, None, None
