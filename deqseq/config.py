"""How an implicit model is solved and differentiated: one record, and one place where it is resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from deqseq.check import check_choice, check_integer, check_number, check_type, suggestion
from deqseq.gradients import Gradient, Phantom
from deqseq.solvers import Adaptive, ExternalSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep


@dataclass(frozen=True)
class RandomStart:
    """Begin at random states: normal numbers, none beyond three standard deviations.

    Args:
        std: standard deviation, above 0. Huginn's is about 0.63, that of its state; the retrofitted models have
            sqrt(2 / (5 d_model)).
        seed: of the draws of each call. Default: torch's global generator.
        restarts: how many starts are solved for each row, in one larger batch. Of those that converged (else of all)
            the one with the smallest residual is returned; its ``updates`` count them all. More than one needs an
            estimator that takes the fixed point alone.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, 2025, arXiv 2502.05171.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6), start=dq.RandomStart(1.0)))
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x).value, model.backbone.solution(x), atol=1e-4)
        True
    """

    std: float = 1.0
    seed: int | None = None
    restarts: int = 1

    def __post_init__(self) -> None:
        check_number("RandomStart.std", self.std, "(0, inf)")
        if self.seed is not None:
            check_integer("RandomStart.seed", self.seed, 0, 2**32 - 1)  # torch's generator on the CPU takes 32 bits
        check_integer("RandomStart.restarts", self.restarts, 1)

    def draw(self, like: Tensor) -> Tensor:
        """States for ``like``, ``(batch, length, d_model)``: ``restarts`` consecutive rows for each of its rows.

        They are drawn on the CPU, and so are the same on every device.
        """
        random = None if self.seed is None else torch.Generator("cpu").manual_seed(int(self.seed))
        shape = (len(like) * self.restarts, *like.shape[1:])
        numbers = torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device="cpu")
        bounds = {"a": -3 * self.std, "b": 3 * self.std}
        return torch.nn.init.trunc_normal_(numbers, 0.0, self.std, **bounds, generator=random).to(like)


Start = Literal["zero", "input"] | RandomStart
"""Where the iteration begins: at zero, at the embedded tokens, or at random states."""


@dataclass(frozen=True)
class SolveConfig:
    """How a fixed point is found and differentiated: five independent choices.

    Args:
        solver: the algorithm.
        stop: tolerances, budget and granularity.
        gradient: the estimator. The sweep finds the fixed point; an attached estimator then acts on the whole sequence
            at once.
        sweep: which tokens are solved together.
        start: where the iteration begins: ``"zero"`` (the paper); ``"input"``, the embedded tokens: the first
            iteration is then the pass of an explicit model of the same layers, plus the injection; or a
            :class:`RandomStart`.

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

    solver: Solver[Any] | ExternalSolver = Adaptive()
    stop: Stop = Stop()
    gradient: Gradient = Phantom(4)
    sweep: Sweep = Simultaneous()
    start: Start = "zero"

    def __post_init__(self) -> None:
        check_type("solver", self.solver, (Solver, ExternalSolver), "dq.Anderson()")
        check_type("stop", self.stop, Stop, "dq.Stop(rtol=1e-3)")
        check_type("gradient", self.gradient, Gradient, "dq.Phantom(4)")
        check_type("sweep", self.sweep, Sweep, "dq.Sliding(8)")
        if not isinstance(self.start, RandomStart):
            check_choice("start", self.start, ("zero", "input", RandomStart(1.0)))


class SolveFields(TypedDict, total=False):
    """The fields of :class:`SolveConfig` as keyword arguments: those given replace the model's own for one call."""

    solver: Solver[Any] | ExternalSolver
    stop: Stop
    gradient: Gradient
    sweep: Sweep
    start: Start | Tensor
    """For one call, the states to begin from, ``(batch, length, d_model)``, are taken too."""


def resolve(config: SolveConfig, solve: SolveConfig | None, changes: Mapping[str, Any]) -> SolveConfig:
    """The configuration of a call: ``changes`` come before ``solve``, which comes before the model's own ``config``.

    Raises:
        TypeError: a name that is no field of :class:`SolveConfig`, or a value of the wrong type.
    """
    check_type("model.solve", config, SolveConfig, "dq.SolveConfig(solver=dq.Anderson())")
    check_type("solve", solve, (SolveConfig, type(None)), "dq.SolveConfig(solver=dq.Anderson())")
    check_fields(changes)
    return replace(solve or config, **changes) if changes else solve or config


def check_fields(changes: Mapping[str, Any]) -> None:
    """Refuse a name that is no field of :class:`SolveConfig`, with a TypeError."""
    names = [field.name for field in fields(SolveConfig)]
    for name in changes:
        if name not in names:
            raise TypeError(f"unknown argument {name!r}{_meant(name, names)} (fields of SolveConfig: {names})")


def _meant(name: str, names: list[str]) -> str:
    """A suggestion, for a field of :class:`Stop`, an argument of transformers, or a name that is close."""
    if name in {field.name for field in fields(Stop)}:
        return f": write stop=dq.Stop({name}=...)"
    theirs = {
        "attention_mask": "mask",
        "use_cache": "return_cache",
        "past_key_values": "cache",
        "do_sample": "temperature",
    }
    return f"; did you mean {theirs[name]!r}?" if name in theirs else suggestion(name, names)
