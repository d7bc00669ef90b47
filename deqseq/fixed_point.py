"""The functional entry: solver x gradient x stopping rule."""

from typing import Any

import torch

from deqseq.arguments import check_type, checked
from deqseq.gradients.base import Gradient
from deqseq.gradients.implicit import Implicit
from deqseq.solution import Solution, Status, warn_failed
from deqseq.solve import checked_problem
from deqseq.solvers.anderson import Anderson
from deqseq.solvers.base import Solver
from deqseq.step import Callback
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, State


@checked
def fixed_point(
    f: FixedPointMap,
    z0: State,
    *,
    args: Any = None,
    solver: Solver[Any] = Anderson(),
    stop: Stop = Stop(),
    gradient: Gradient | None = None,
    throw: bool = False,
    callback: Callback | None = None,
) -> Solution:
    r"""A fixed point :math:`z^* = f(z^*)` that can be differentiated.

    Args:
        f: the map, ``(batch, *event) -> (batch, *event)``. All tensors that it closes over, and
            ``args``, receive gradients.
        z0: the start, ``(batch, *event)``, floating point and finite.
        args: inputs of the map with one entry per row, as in :func:`deqseq.solve`; the map is
            called as ``f(z, args)``. Default: the map takes only ``z``.
        solver: the algorithm.
        stop: tolerances and budget. By default each vector along the last dimension (a token) has
            to meet the tolerance; for images and other states that are not sequences take
            ``Stop(norm="row")``, one norm per row.
        gradient: the estimator. Default: :class:`Implicit`, the exact gradient, if anything in
            ``f`` requires one. If you pass one, something in ``f`` must require a gradient.
        throw: whether rows that did not converge raise an error.
        callback: called with a :class:`~deqseq.Progress` at every check of the residual.

    Returns:
        The solution: value, status and statistics, per row.

    Warns:
        ConvergenceWarning: a row spent its budget or diverged, and ``stop`` has a tolerance.

    Raises:
        TypeError, ValueError: as in :func:`solve`.
        ConvergenceError: with ``throw``, names the rows that did not converge, their residuals and
            a remedy.
        ValueError: ``gradient`` was passed and gradients are enabled, but nothing in ``f`` requires
            one; or ``z0`` requires one that the estimator would drop.

    Example:
        >>> import torch, deqseq as dq
        >>> W = torch.eye(3) / 2
        >>> solution = dq.fixed_point(
        ...     lambda z: torch.tanh(z @ W + 1), torch.zeros(2, 3), throw=True
        ... )
        >>> solution.value[0, 0]
        tensor(0.8952)
    """
    problem = checked_problem(f=f, z0=z0, args=args, solver=solver, stop=stop, callback=callback)
    chosen = Implicit() if gradient is None else gradient
    solution = chosen.apply(problem)
    check_type(f"what {type(chosen).__name__}.apply returns", solution, Solution)
    if throw:
        solution.raise_if_failed()
    warn_failed(solution.ends, stop)
    graphless = torch.is_grad_enabled() and not solution.value.requires_grad
    if gradient is not None and graphless and not (solution.ends == Status.DIVERGED).all():
        raise ValueError(
            f"gradient={gradient} finds nothing to differentiate: the value has no graph. f(z) "
            "must depend on a tensor "
            "that requires a gradient (frozen parameters? a no_grad or detach inside f?). Leave "
            "gradient out, or solve "
            "under torch.no_grad()"
        )
    return solution
