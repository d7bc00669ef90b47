"""How an implicit model is solved and differentiated: one record, and one place where it is
resolved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import Tensor

from deqseq.arguments import check_type, checked
from deqseq.gradients import Gradient, Phantom
from deqseq.solvers import Adaptive, Solver
from deqseq.start import Start
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep


@checked
@dataclass(frozen=True)
class SolveConfig:
    """How a fixed point is found and differentiated: five choices.

    They can be combined freely, with two exceptions: :class:`~deqseq.Unrolled` needs the
    :class:`Simultaneous` sweep, and an :class:`~deqseq.ExternalSolver` a sweep with ``window=1``.

    Args:
        solver: the algorithm.
        stop: tolerances and budget.
        gradient: the estimator. The sweep finds the fixed point; any estimator but
            ``Unrolled`` is applied afterwards, to the whole sequence at once.
        sweep: which tokens are solved together.
        start: where the iteration begins: ``"zero"`` (the paper); ``"input"``, the embedded tokens;
            or a :class:`RandomStart`. From ``"input"``, the first iteration is one pass of the
            explicit model of the same layers, plus the injection.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown ``start``.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.SolveConfig(stop=dq.Stop(rtol=1e-4), sweep=dq.Sliding(8))
        >>> model = dq.ImplicitModel(dq.Affine(4), config)
        >>> model(torch.ones(2, 9, 4)).stats.iterations.shape
        torch.Size([2, 9])
    """

    solver: Solver[Any] = Adaptive()
    stop: Stop = Stop()
    gradient: Gradient = Phantom(4)
    sweep: Sweep = Simultaneous()
    start: Start = "zero"


class SolveFields(TypedDict, total=False):
    """The fields of :class:`SolveConfig` as keyword arguments: those given replace the model's own
    for one call.
    """

    solver: Solver[Any]
    stop: Stop
    gradient: Gradient
    sweep: Sweep
    start: Start | Tensor
    """For one call, also the states to begin from, ``(batch, length, state_width)``."""


def resolve(
    config: SolveConfig, solve: SolveConfig | None, changes: Mapping[str, Any]
) -> SolveConfig:
    """The configuration of a call: ``solve`` instead of the model's own ``config``, with
    ``changes``.
    """
    check_type(
        "model.solve or eval_solve", config, SolveConfig
    )  # attributes, which anything can be assigned to
    check_type("solve", solve, (SolveConfig, type(None)))
    chosen = solve or config
    return replace(chosen, **changes) if changes else chosen
