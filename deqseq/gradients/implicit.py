"""The exact gradient of a fixed point, by the implicit function theorem."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deqseq.evaluate import evaluate
from deqseq.gradients.base import AttachedGradient
from deqseq.solution import ConvergenceWarning, Solution, describe_failure
from deqseq.solve import solve
from deqseq.solvers.anderson import Anderson
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, State

ADJOINT = "the adjoint solve of Implicit"


@dataclass(frozen=True)
class Implicit(AttachedGradient):
    r"""The exact gradient: the backward pass solves a second, linear fixed-point problem.

    With :math:`J = \partial f / \partial z` at the fixed point and an incoming gradient :math:`g`,

    .. math:: y = J^\top y + g, \qquad \frac{dL}{d\theta} = y^\top \frac{\partial f}{\partial \theta}.

    Memory is that of one evaluation, whatever the number of self-iterations. Each adjoint step costs one backward
    pass through the map. A second derivative is not offered (differentiate :class:`Unrolled` for that).

    Args:
        solver: the algorithm of the adjoint solve.
        stop: its tolerances and budget.
        throw: whether an adjoint solve that does not converge raises; otherwise it warns.
        report: called with the adjoint's :class:`~deqseq.Solution` in each backward pass.

    Raises:
        ConvergenceError: in the backward pass, with ``throw``.

    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, NeurIPS 2019, arXiv 1909.01377, theorem 1.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(lambda z: a * z + 1, torch.zeros(1, 1), gradient=dq.Implicit())
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)     # d/da 1 / (1 - a)
        4.0
    """

    solver: Solver | OutsideSolver = Anderson()
    stop: Stop = Stop(rtol=1e-5, max_steps=100, norm="frobenius")
    throw: bool = False
    report: Callable[[Solution], None] | None = None

    def attach(self, f: FixedPointMap, z_star: State) -> State:
        z = z_star.detach().requires_grad_(torch.is_grad_enabled())
        fz = evaluate(f, z)
        if not fz.requires_grad or not _reaches_another_leaf(fz, z):
            return fz.detach()
        value = _Adjoint.apply(fz, z, self)
        assert isinstance(value, Tensor)
        return value


class _Adjoint(torch.autograd.Function):
    """Identity on ``f(z*)`` whose backward pass turns the incoming gradient into the adjoint solution.

    The graph of ``f(z*)`` then carries that solution on to the parameters, so the map is evaluated once.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, z: Tensor, implicit: Implicit) -> Tensor:
        ctx.save_for_backward(fz, z)
        ctx.implicit = implicit
        return fz.view_as(fz)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not bool(torch.isfinite(grad).all()):
            return grad, None, None  # loss scaling looks for infinities in the parameters' gradients
        fz, z = ctx.saved_tensors
        implicit: Implicit = ctx.implicit

        def adjoint(y: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(fz, z, y, retain_graph=True, allow_unused=True)
            return grad if pulled is None else pulled + grad

        solution = solve(adjoint, grad, solver=implicit.solver, stop=implicit.stop)
        if implicit.report is not None:
            implicit.report(solution)
        if implicit.throw:
            solution.raise_if_failed(ADJOINT)
        elif not bool(solution.converged.all()):
            warnings.warn(describe_failure(solution, ADJOINT), ConvergenceWarning, stacklevel=2)
        return solution.value, None, None


def _reaches_another_leaf(output: Tensor, leaf: Tensor) -> bool:
    """Whether a backward pass from ``output`` would end in any leaf but ``leaf``."""
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node that accumulates a leaf's gradient
            if node.variable is not leaf:
                return True
            continue
        todo.extend(parent for parent, _ in node.next_functions)
    return False
