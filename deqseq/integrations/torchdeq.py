"""TorchDEQ's solvers as solvers of ours."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from deqseq.arguments import (
    Between,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_known,
    checked,
)
from deqseq.solution import ConvergenceWarning
from deqseq.solvers import ExternalSolver
from deqseq.stop import Stop
from deqseq.types import State

_OPTIONS = {
    "fixed_point_iter": ("tau",),
    "simple_fixed_point_iter": ("tau",),
    "anderson": ("m", "lam", "tau"),
    "broyden": ("LBFGS_thres",),
}
_UNCOUNTED = {"anderson": (3, 0), "broyden": (1, 1)}
"""The smallest ``max_iter`` with which a solver takes a step, and its evaluations beyond that."""


@checked
@dataclass(frozen=True)
class TorchDEQ(ExternalSolver):
    r"""One of TorchDEQ's solvers, in TorchDEQ's own loop.

    It stops by its own test, with ``stop.rtol``, or with ``stop.atol`` if that is zero. Its norms
    are over whole rows, whatever ``stop.norm`` is, and all rows of the batch go on until the last
    one has passed. :func:`deqseq.solve` then evaluates the map once at the result, and tests it by
    ``stop``; take ``Stop(norm="row")`` for the same norms. With ``Stop.exactly(n)``, TorchDEQ makes
    ``n - 1`` evaluations. ``"anderson"`` needs ``n >= 4`` for that, ``"broyden"`` ``n >= 3``; with
    a smaller budget only the start is evaluated.

    Args:
        name: ``"fixed_point_iter"``, ``"simple_fixed_point_iter"`` (which has no tolerance and
            spends its budget), ``"anderson"`` or ``"broyden"``.
        tau: damping of the fixed-point iterations, or mixing of ``"anderson"``. Default:
            TorchDEQ's, 1.
        m: evaluations that ``"anderson"`` combines, at least 2. Default: 6.
        lam: absolute ridge of ``"anderson"``. Default: 1e-4.
        LBFGS_thres: memory of ``"broyden"``, allocated at once. Default: the whole budget.

    Raises:
        ValueError: an option of another solver; during a solve, a gradient through a solver that
            TorchDEQ cuts off from the graph: all but ``"simple_fixed_point_iter"``.

    Warns:
        ConvergenceWarning: the linear system of ``"anderson"`` is singular, which ends the run for
            all rows.

    References:
        Geng and Kolter, TorchDEQ: A Library for Deep Equilibrium Models, 2023, arXiv 2310.18605.

    Example:
        >>> from deqseq.integrations.torchdeq import TorchDEQ
        >>> import torch, deqseq as dq
        >>> dq.solve(
        ...     torch.cos, torch.zeros(1, 1), solver=TorchDEQ("broyden"), stop=dq.Stop(rtol=1e-6)
        ... ).value
        tensor([[0.7391]])
    """

    combines = True

    name: Literal["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
    tau: PositiveFloat | None = None
    m: Annotated[int, Between(2)] | None = None
    lam: NonNegativeFloat | None = None
    LBFGS_thres: PositiveInt | None = None

    def __post_init__(self) -> None:
        for option in self._options():
            check_known(f"TorchDEQ({self.name!r}): option", option, _OPTIONS[self.name])

    def _options(self) -> dict[str, Any]:
        fields = vars(self).items()
        return {name: value for name, value in fields if name != "name" and value is not None}

    def run(self, f: Callable[[State], State], z0: State, stop: Stop) -> State:
        """TorchDEQ's result; ``z0`` where the budget does not suffice for a step.

        Raises:
            ValueError: the rule or the gradient mode is one that TorchDEQ's solver does not have.
        """
        # Python warns of invalid escapes in its docstrings when it compiles them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchdeq.solver import get_solver

        latest = z0

        def called(z: State, tau: float = 1.0) -> State:
            nonlocal latest
            latest = fz = f(z)
            if fz.requires_grad and self.name != "simple_fixed_point_iter":
                raise ValueError(
                    f"TorchDEQ's {self.name} detaches what it returns, so it cannot be "
                    "differentiated: solve under torch.no_grad(), use Phantom() or Implicit(), or "
                    'take "simple_fixed_point_iter"'
                )
            # simple_fixed_point_iter leaves the damping to the map
            return fz if tau == 1 else torch.lerp(z, fz, tau)

        smallest, uncounted = _UNCOUNTED.get(self.name, (1, 0))
        max_iter = stop.max_steps - 1 - uncounted
        if max_iter < smallest:
            return z0
        mode, tolerance = ("rel", stop.rtol) if stop.rtol else ("abs", stop.atol)
        if self.name == "fixed_point_iter":  # it measures the damped step
            tolerance *= self.tau or 1.0
        options = self._options() | {"return_final": not stop.has_tolerance, "max_iter": max_iter}
        try:
            value, *_ = get_solver(self.name)(called, z0, stop_mode=mode, tol=tolerance, **options)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            warnings.warn(
                f"TorchDEQ's {self.name} stopped at a singular linear system: raise lam, or use "
                f"Anderson() ({error})",
                ConvergenceWarning,
                stacklevel=2,
            )
            return latest
        return value
