"""TorchDEQ's solvers as solvers of ours, and its configurations as ours."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch

from deqseq.annotations import AtLeast, Within, checked
from deqseq.check import check_known, check_type
from deqseq.config import SolveConfig
from deqseq.gradients import Gradient, Implicit, Phantom
from deqseq.integrations.fields import Fields, Only, Table, only
from deqseq.solution import ConvergenceWarning
from deqseq.solvers import Anderson, Broyden, ExternalSolver, Naive, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.types import State

SolverName = Literal["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]

SOLVER_OPTIONS: dict[str, tuple[str, ...]] = {
    "fixed_point_iter": ("tau",),
    "simple_fixed_point_iter": ("tau",),
    "anderson": ("m", "lam", "tau"),
    "broyden": ("LBFGS_thres",),
}
"""The options of each of TorchDEQ's solvers, under its own names."""

_UNCOUNTED = {"anderson": (3, 0), "broyden": (1, 1)}
"""The smallest ``max_iter`` with which a solver takes a step, and how many evaluations it makes beyond ``max_iter``.

TorchDEQ's Anderson evaluates twice before its first step, which are counted; its Broyden once, which is not.
"""

_FORWARD = {"f_solver": "fixed_point_iter", "f_max_iter": 40, "f_tol": 1e-3, "f_stop_mode": "abs"}
_EVALUATION = {"eval_factor": 1.0, "eval_f_max_iter": 0, "no_stat": False}
_ADJOINT = {"b_solver": "fixed_point_iter", "b_max_iter": 40, "b_tol": 1e-6, "b_stop_mode": "abs"}
_GRADIENT = {"core": "sliced", "ift": False, "hook_ift": False, "grad": 1, "tau": 1.0, "gamma": 0.8}
_STATES = {"n_states": 1, "indexing": (), "sup_gap": -1, "sup_loc": ()}
_NORM = {"norm_type": None, "norm_no_scale": False, "norm_target_norm": 1.0, "sn_n_power_iters": 1}
# norm_clip_val is how the paper's reference code spells norm_clip_value; TorchDEQ never reads it
_CLIP = {"norm_clip": False, "norm_clip_value": 1.0, "norm_clip_val": 1.0}
_PENALTY = {"jac_loss_weight": 0.0, "jac_loss_freq": 0.0, "jac_incremental": 0, "sradius_mode": False}

CONFIG_GROUPS: dict[str, dict[str, Any]] = {
    "solver": _FORWARD | _EVALUATION | _ADJOINT,
    "training": _GRADIENT | _STATES,
    "norm": _NORM | _CLIP,
    "regularization": _PENALTY,
}
"""Every key of a TorchDEQ configuration with TorchDEQ's default, by the groups of a nested one."""

CONFIG_DEFAULTS = {key: default for group in CONFIG_GROUPS.values() for key, default in group.items()}


@checked
@dataclass(frozen=True)
class TorchDEQ(ExternalSolver):
    r"""One of TorchDEQ's solvers, in TorchDEQ's own loop.

    It stops by its own test, with the relative tolerance of our stopping rule, or the absolute one if the relative one
    is zero. Its norms are over whole rows, whatever ``stop.norm`` is, and all rows of the batch go on until the last
    one has passed. :func:`deqseq.solve` then evaluates the map once at the result, and tests that by our rule; take
    ``Stop(norm="row")`` for the same norms. With ``Stop.exactly(n)``, ``n - 1`` evaluations are TorchDEQ's.

    Args:
        name: ``"fixed_point_iter"``, ``"simple_fixed_point_iter"`` (which has no tolerance and spends its budget),
            ``"anderson"`` or ``"broyden"``.
        tau: damping of the fixed-point iterations, or mixing of ``"anderson"``. Default: TorchDEQ's, 1.
        m: evaluations that ``"anderson"`` combines, at least 2. Default: 6.
        lam: absolute ridge of ``"anderson"``. Default: 1e-4.
        LBFGS_thres: memory of ``"broyden"``, allocated at once. Default: the whole budget.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an unknown solver, an option of another solver, or a number out of its range; during a solve, a
            gradient through a solver that TorchDEQ cuts off from the graph: all but ``"simple_fixed_point_iter"``.

    Warns:
        ConvergenceWarning: the linear system of ``"anderson"`` is singular, which ends the run for all rows.

    References:
        Geng and Kolter, TorchDEQ: A Library for Deep Equilibrium Models, 2023, arXiv 2310.18605.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.solve(torch.cos, torch.zeros(1, 1), solver=TorchDEQ("broyden"), stop=dq.Stop(rtol=1e-6)).value
        tensor([[0.7391]])
    """

    returns_point = True

    name: SolverName
    tau: Annotated[float, Within("(0, inf)")] | None = None
    m: Annotated[int, AtLeast(2)] | None = None
    lam: Annotated[float, Within("[0, inf)")] | None = None
    LBFGS_thres: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        for option in self.options:
            check_known(f"TorchDEQ({self.name!r}): option", option, SOLVER_OPTIONS[self.name])

    @property
    def options(self) -> dict[str, Any]:
        """The given options, under TorchDEQ's names."""
        given = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {option: value for option, value in given.items() if value is not None}

    @property
    def measured(self) -> float:
        """Length of what TorchDEQ's test measures, relative to ``f(z) - z``: one of its solvers measures the step."""
        return self.tau or 1.0 if self.name == "fixed_point_iter" else 1.0

    def run(self, f: Callable[[State], State], z0: State, stop: Stop) -> State:
        """TorchDEQ's result; ``z0`` where the budget does not suffice for a step; ValueError for a gradient."""
        with warnings.catch_warnings():  # its docstrings have invalid escapes, which warn when first compiled
            warnings.simplefilter("ignore")
            from torchdeq.solver import get_solver

        latest = z0

        def called(z: State, tau: float = 1.0) -> State:
            nonlocal latest
            latest = fz = f(z)
            if fz.requires_grad and self.name != "simple_fixed_point_iter":
                raise ValueError(
                    f"TorchDEQ's {self.name} detaches what it returns, so it cannot be differentiated: solve under "
                    'torch.no_grad(), use Phantom() or Implicit(), or take "simple_fixed_point_iter"'
                )
            return fz if tau == 1 else torch.lerp(z, fz, tau)  # simple_fixed_point_iter has the map damp

        least, more = _UNCOUNTED.get(self.name, (1, 0))
        max_iter = stop.max_steps - 1 - more
        if max_iter < least:
            return z0
        mode, tolerance = ("rel", stop.rtol) if stop.rtol else ("abs", stop.atol)
        test = {"stop_mode": mode, "tol": tolerance * self.measured, "return_final": not stop.has_tolerance}
        try:
            z, _, _ = get_solver(self.name)(called, z0, max_iter=max_iter, **test, **self.options)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            message = f"TorchDEQ's {self.name} stopped at a singular linear system: raise lam, or use Anderson()"
            warnings.warn(f"{message} ({error})", ConvergenceWarning, stacklevel=2)
            return latest
        return z


@checked
def from_torchdeq_config(
    config: Mapping[str, Any], *, solver_kwargs: Mapping[str, Any] | None = None, native: bool = True
) -> tuple[SolveConfig, SolveConfig]:
    """Turn a configuration of TorchDEQ into ours; every key is translated or refused with a reason.

    A missing key has TorchDEQ's default. Weight normalisation (``norm_type``) belongs to the backbone, and the spectral
    radius (``sradius_mode``) to :mod:`deqseq.diagnostics`; both keys are checked and otherwise not used. Differences:
    a converged row is frozen here, while TorchDEQ iterates all rows until the slowest has converged; a budget counts
    evaluations, of which TorchDEQ's Broyden makes one more; TorchDEQ's fixed-point iteration measures the damped step,
    so its tolerance is divided by the damping; our Anderson has a relative ridge, our Broyden no line search; an
    adjoint solve starts at the incoming gradient, scaled to 1 in each row, so that an absolute tolerance
    (``b_stop_mode``) is relative to it.

    Args:
        config: what ``torchdeq.get_deq`` takes, flat, or in the groups ``solver``, ``training``, ``norm`` and
            ``regularization``. Its ``tau`` is the damping of the phantom gradient alone.
        solver_kwargs: options of the forward solver, which TorchDEQ takes in its call:
            ``deq(f, z0, solver_kwargs={"tau": 0.8})``.
        native: whether to use deqseq's own solvers. Otherwise: :class:`TorchDEQ` objects.

    Returns:
        How to solve in training, and in evaluation: ``deqseq.ImplicitModel(backbone, *from_torchdeq_config(config))``.

    Raises:
        ValueError: an unknown key or value, or something that has no equivalent here.

    References:
        Geng and Kolter, TorchDEQ: A Library for Deep Equilibrium Models, 2023, arXiv 2310.18605.

    Example:
        >>> solve, evaluation = from_torchdeq_config({"f_tol": 0.05, "f_stop_mode": "rel", "grad": 4, "eval_factor": 2})
        >>> solve.solver, solve.gradient.steps, solve.stop.rtol
        (Naive(), 4, 0.05)
        >>> solve.stop.max_steps, evaluation.stop.max_steps
        (40, 80)
    """
    fields = Fields(CONFIG_DEFAULTS | _flatten(config), "torchdeq key ")
    _refuse_without_equivalent(fields)
    budget, factor = fields.read("f_max_iter", int), fields.read("eval_factor", float)
    given = fields.read("eval_f_max_iter", int, low=0)
    if not given and not 1 <= budget * factor <= 1e9:
        fields.refuse("eval_factor", f"such that the budget in evaluation is from 1 to 10**9, got {factor}")
    eval_budget = given or int(budget * factor)
    forward = _external(fields.get("f_solver"), solver_kwargs or {})
    solve = SolveConfig(
        solver=_native(forward, max(budget, eval_budget)) if native else forward,
        stop=_stop(fields, "f", budget, forward),
        gradient=_gradient(fields, native),
    )
    return solve, replace(solve, stop=_stop(fields, "f", eval_budget, forward))


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration without their groups, all of them known, each given once."""
    flat: dict[str, Any] = {}
    for outer, content in config.items():
        nested = outer in CONFIG_GROUPS
        if nested:
            check_type(f"torchdeq group {outer!r}", content, Mapping)
        for key, value in content.items() if nested else ((outer, content),):
            if key in ("m", "lam", "LBFGS_thres", "ls"):
                raise ValueError(f"torchdeq ignores {key!r} in a configuration: pass it in solver_kwargs")
            check_known("torchdeq key", key, CONFIG_GROUPS[outer] if nested else CONFIG_DEFAULTS)
            if key in flat:
                raise ValueError(f"torchdeq key {key!r} is given twice: in its group and outside of it")
            flat[key] = value[0] if key == "grad" and isinstance(value, list | tuple) and len(value) == 1 else value
    return flat


_PENALTY_REMEDY = "it is part of the loss: add deqseq.training.jacobian_regularisation to it"
_ONLY: Table = {
    **dict.fromkeys(("indexing", "sup_loc"), Only((), [], None)),
    "n_states": Only(1, 0),
    "sup_gap": Only(-1, 0),
    "norm_type": Only(None, "none", "weight_norm"),
    **only(_PENALTY_REMEDY, jac_loss_weight=0, jac_incremental=0),
}


def _refuse_without_equivalent(fields: Fields) -> None:
    fields.choice("core", ("sliced", "indexing"))
    fields.take(_ONLY)
    if fields.get("norm_type") != "none":
        fields.take(only(norm_no_scale=False, norm_clip=False))


def _external(name: str, options: Mapping[str, Any]) -> TorchDEQ:
    """TorchDEQ's solver of that name, with its options checked."""
    check_known("torchdeq solver", name, SOLVER_OPTIONS)
    options = dict(options)
    if name == "broyden" and options.pop("ls", False):
        raise ValueError("solver_kwargs 'ls': a line search makes more evaluations than a budget allows: drop it")
    for option in options:
        check_known(f"solver_kwargs of {name!r}: option", option, SOLVER_OPTIONS[name])
    return TorchDEQ(name, **options)  # pyright: ignore[reportArgumentType]


def _native(external: TorchDEQ, budget: int) -> Solver:
    """Our solver that does the same as TorchDEQ's."""
    if external.lam is not None:
        raise ValueError(
            "solver_kwargs 'lam': the ridge of deqseq's Anderson is relative: drop it or pass native=False"
        )
    tau = 1.0 if external.tau is None else external.tau
    if external.name == "anderson":
        return Anderson(memory=external.m or 6, mixing=tau)
    if external.name == "broyden":
        return Broyden(memory=external.LBFGS_thres or budget)
    return Naive() if tau == 1 else Relaxed(damping=tau)


def _stop(fields: Fields, side: Literal["f", "b"], max_steps: int, external: TorchDEQ) -> Stop:
    """TorchDEQ's test: one norm over each row, and all rows must pass."""
    tolerance = fields.read(f"{side}_tol", float, interval="[0, inf)") / external.measured
    relative = fields.choice(f"{side}_stop_mode", ("abs", "rel")) == "rel"
    if external.name == "simple_fixed_point_iter":
        return Stop.exactly(max_steps)
    rtol, atol = (tolerance, 0.0) if relative else (0.0, tolerance)
    return Stop(rtol=rtol, atol=atol, max_steps=max_steps, norm="row")


def _gradient(fields: Fields, native: bool) -> Gradient:
    steps, budget = fields.read("grad", int), fields.read("b_max_iter", int)
    adjoint = _external(fields.get("b_solver"), {})
    stop = _stop(fields, "b", budget, adjoint)
    if not any([fields.read("ift", bool), fields.read("hook_ift", bool)]):
        return Phantom(steps=steps, damping=fields.read("tau", float, interval="(0, 1]"))
    if adjoint.name == "simple_fixed_point_iter":
        fields.refuse(
            "b_solver", f"'fixed_point_iter', 'anderson' or 'broyden', got {adjoint.name!r}"
        )  # TorchDEQ fails
    return Implicit(solver=_native(adjoint, budget) if native else adjoint, stop=stop)
