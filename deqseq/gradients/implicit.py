"""The exact gradient of a fixed point, by the implicit function theorem."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deqseq.arguments import checked
from deqseq.gradients.base import AttachedGradient
from deqseq.rows import per_row
from deqseq.solution import Solution, warn_caller
from deqseq.solve import Problem
from deqseq.solvers.anderson import Anderson
from deqseq.solvers.base import Solver
from deqseq.step import autocast_dtype
from deqseq.stop import Stop
from deqseq.types import State

ADJOINT = "the adjoint solve of Implicit"
FAILED = (  # always the same words, so that Python shows them once in a training run
    f"{ADJOINT} failed for some rows, whose gradients are those of its last iterate. Remedy: "
    "raise Stop.max_steps of "
    "Implicit(stop=...), make the map contractive, or take Phantom(); report= receives each "
    "adjoint solution"
)


@checked
@dataclass(frozen=True)
class Implicit(AttachedGradient):
    r"""The exact gradient: the backward pass solves a second, linear fixed-point problem.

    With :math:`J = \partial f / \partial z` at the fixed point and an incoming gradient :math:`g`,

    .. math:: y = J^\top y + g, \qquad \frac{dL}{d\theta} = y^\top \frac{\partial f}{\partial
    \theta}.

    It needs the memory of one evaluation. Each iteration of this second solve, the adjoint solve,
    costs one backward pass through the map. The gradient cannot be differentiated again (use
    :class:`~deqseq.Unrolled`). A map compiled with ``torch.compile`` needs
    ``torch._functorch.config.donated_buffer = False``, because its graph is used more than once. A
    ``stop.rtol`` below the machine epsilon of the map's dtype (or autocast's) is raised to it.

    Args:
        solver: the algorithm of the adjoint solve.
        stop: tolerances and budget of the adjoint solve; ``atol`` is relative to the largest entry
            of each row's incoming gradient.
        throw: whether an adjoint solve that does not converge raises an error; otherwise it warns.
        report: called with the adjoint's :class:`~deqseq.Solution` in each backward pass.

    Raises:
        TypeError: an argument of the wrong type.
        ConvergenceError: in the backward pass, with ``throw``.
        RuntimeError: in the backward pass, with ``create_graph`` or ``is_grads_batched``.

    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, NeurIPS 2019, arXiv 1909.01377, theorem 1.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(
        ...     lambda z: a * z + 1, torch.zeros(1, 1), gradient=dq.Implicit()
        ... )
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)  # d/da 1 / (1 - a)
        4.0
    """

    solver: Solver = Anderson()
    stop: Stop = Stop(rtol=1e-5, max_steps=100, norm="row")
    throw: bool = False
    report: Callable[[Solution], None] | None = None

    @checked
    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        z = z_star.detach().requires_grad_(torch.is_grad_enabled())
        fz = f(z)
        if not fz.requires_grad or not _reaches_another_leaf(fz, z):
            return z.detach()
        value = _Adjoint.apply(fz, z, _within_reach(self, z))
        assert isinstance(value, Tensor)
        return value


def _within_reach(implicit: Implicit, z: State) -> Implicit:
    """The same with a tolerance that the precision in which the map was evaluated can meet."""
    precision = torch.finfo(autocast_dtype(z.device) or z.dtype).eps
    if implicit.stop.rtol >= precision:
        return implicit
    return replace(implicit, stop=replace(implicit.stop, rtol=precision))


class _Adjoint(torch.autograd.Function):
    """The fixed point ``z*``, whose gradient reaches ``f(z*)`` as the adjoint solution.

    The graph of ``f(z*)`` then carries that solution on to the parameters, so the map is evaluated
    once.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, z: Tensor, implicit: Implicit) -> Tensor:
        ctx.save_for_backward(fz, z)
        ctx.implicit = implicit
        return torch.where(fz.isfinite(), z, fz)  # where the map is not finite, neither is this

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Implicit has no second derivative (create_graph=True): differentiate Unrolled() "
                "for that"
            )
        torch_c: Any = torch._C
        functorch = torch_c._functorch
        if functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad):
            raise RuntimeError(
                "Implicit cannot solve for many gradients at once (is_grads_batched=True, "
                "jacobian(vectorize=True)): "
                "ask for them one by one, or take Phantom or Unrolled"
            )
        fz, z = ctx.saved_tensors
        implicit: Implicit = ctx.implicit
        # The adjoint is linear, so each row is scaled to unit size and small gradients do not
        # underflow. Rows with infinities skip the solve and are returned unchanged, because
        # GradScaler looks for them.
        size = per_row(grad.reshape(len(grad), -1).abs().amax(dim=1), grad)
        finite = torch.isfinite(size)
        size = torch.where(finite & (size > 0), size, 1)
        source = torch.where(finite, grad / size, 0)

        def adjoint(y: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(fz, z, y, retain_graph=True, allow_unused=True)
            return source if pulled is None else pulled + source

        problem = Problem(f=adjoint, z0=source, solver=implicit.solver, stop=implicit.stop)
        solution = problem.solve()
        if implicit.report is not None:
            implicit.report(solution)
        if implicit.throw:
            solution.raise_if_failed(ADJOINT)
        elif not bool(solution.converged.all()):
            warn_caller(FAILED)
        return torch.where(finite, solution.value * size, grad), None, None


def _reaches_another_leaf(output: Tensor, leaf: Tensor) -> bool:
    """Whether a backward pass from ``output`` would end in any leaf but ``leaf``."""
    if output.grad_fn is None:
        return output is not leaf
    todo: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(
            node, "variable", None
        )  # only the nodes that accumulate a leaf's gradient have one
        if variable is not None and variable is not leaf:
            return True
        if type(node).__name__ == "CheckpointFunctionBackward":
            # use_reentrant=True hides the parameters; torch's error in the backward pass says what
            # to do
            return True
        todo.extend(parent for parent, _ in node.next_functions)
    return False
