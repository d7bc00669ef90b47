"""How an implicit model is solved and differentiated: one record, and one place where it is resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

from deqseq.gradients import Gradient, Phantom
from deqseq.names import suggestion
from deqseq.solvers import ExternalSolver, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep

Start = Literal["zero", "input"]
"""Where the iteration begins: at zero, or at the embedded tokens."""


@dataclass(frozen=True)
class SolveConfig:
    """How a fixed point is found and differentiated: five independent choices.

    Args:
        solver: the algorithm.
        stop: tolerances, budget and granularity.
        gradient: the estimator. The sweep finds the fixed point; an attached estimator then acts on the whole sequence
            at once.
        sweep: which tokens are solved together.
        start: where the iteration begins, ``"zero"`` (the paper) or ``"input"``, the embedded tokens: the first
            iteration is then the pass of an explicit model of the same layers, plus the injection.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown ``start``.

    Example:
        >>> from dataclasses import replace
        >>> import deqseq as dq
        >>> config = dq.SolveConfig(stop=dq.Stop(rtol=1e-4), sweep=dq.Sliding(8))
        >>> replace(config, solver=dq.Anderson()).sweep
        Sliding(window=8)
    """

    solver: Solver[Any] | ExternalSolver = Relaxed(0.8)
    stop: Stop = Stop()
    gradient: Gradient = Phantom(4)
    sweep: Sweep = Simultaneous()
    start: Start = "zero"

    def __post_init__(self) -> None:
        wanted: dict[str, Any] = {
            "solver": (Solver, ExternalSolver),
            "stop": Stop,
            "gradient": Gradient,
            "sweep": Sweep,
        }
        for name, kind in wanted.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
                raise TypeError(f"{name} must be a {names} object, such as {_EXAMPLES[name]}, got {value!r}")
        if self.start not in get_args(Start):
            raise ValueError(f"start must be one of {get_args(Start)}, got {self.start!r}")


_EXAMPLES = {
    "solver": "dq.Relaxed(0.8)",
    "stop": "dq.Stop(rtol=1e-3)",
    "gradient": "dq.Phantom(4)",
    "sweep": "dq.Sliding(8)",
}


class SolveFields(TypedDict, total=False):
    """The fields of :class:`SolveConfig` as keyword arguments: those given replace the model's own for one call."""

    solver: Solver[Any] | ExternalSolver
    stop: Stop
    gradient: Gradient
    sweep: Sweep
    start: Start


def check_config(name: str, config: object) -> None:
    """Raise a TypeError unless an argument is a :class:`SolveConfig`."""
    if not isinstance(config, SolveConfig):
        raise TypeError(f"{name} must be a SolveConfig, such as dq.SolveConfig(solver=dq.Anderson()), got {config!r}")


def resolve(config: SolveConfig, solve: SolveConfig | None, changes: Mapping[str, Any]) -> SolveConfig:
    """The configuration of a call: ``changes`` come before ``solve``, which comes before the model's own ``config``.

    Raises:
        TypeError: a name that is no field of :class:`SolveConfig`, or a value of the wrong type.
    """
    if solve is not None:
        check_config("solve", solve)
    names = [field.name for field in fields(SolveConfig)]
    for name in changes:
        if name not in names:
            raise TypeError(f"unknown argument {name!r}{suggestion(name, names)} (fields of SolveConfig: {names})")
    return replace(solve or config, **changes) if changes else solve or config
