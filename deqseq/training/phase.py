"""One phase of training as data: how the fixed point is solved and differentiated, and until when."""

import math
from dataclasses import dataclass

from torch import nn

from deqseq.gradients import Gradient, Phantom, Unrolled
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel
from deqseq.solvers import OutsideSolver, Solver
from deqseq.stop import Stop

EVAL_FACTOR = 4  # the paper allows this many times the self-iterations at evaluation


@dataclass(frozen=True)
class Phase:
    """One way of solving and differentiating.

    :func:`bounded`, :func:`free` and :func:`unrolled` make the usual ones. The sweep is no part of a phase: it is an
    argument of the model's call.

    Args:
        name: for logs and checkpoints.
        until: where it ends, in the unit of its :class:`Curriculum`; None: with the run.
        stop: tolerances and budget of the solve in training.
        gradient: the estimator.
        solver: the algorithm; None: the model's own stays.
        eval_stop: tolerances and budget in eval mode; None: the model's own stay.

    Raises:
        ValueError: no name, or an end that is not above 0.

    Example:
        >>> import deqseq as dq
        >>> Phase("exact", 0.9, dq.Stop(rtol=1e-6), dq.Implicit()).until
        0.9
    """

    name: str
    until: float | int | None
    stop: Stop
    gradient: Gradient
    solver: Solver | OutsideSolver | None = None
    eval_stop: Stop | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("Phase.name must not be empty")
        end = self.until
        if end is not None and (isinstance(end, bool) or not 0 < end < math.inf):
            raise ValueError(f"Phase.until must be a number above 0, or None for the end of the run, got {end!r}")

    def apply(self, model: nn.Module) -> None:
        """Make every implicit model inside train this way from now on.

        An :class:`ExplicitModel` has nothing to solve and stays as it is, so that a baseline runs through the same
        loop.

        Args:
            model: an :class:`ImplicitModel` or :class:`ExplicitModel`, or what contains one: a :class:`CausalLM`, a
                model of transformers, one that is wrapped for several processes.

        Raises:
            TypeError: there is neither inside.
        """
        parts = list(model.modules())
        implicit = [part for part in parts if isinstance(part, ImplicitModel)]
        if not implicit and not any(isinstance(part, ExplicitModel) for part in parts):
            raise TypeError(
                f"a phase applies to an ImplicitModel or what contains one (an ExplicitModel is left as it is), got "
                f"{type(model).__name__} without either"
            )
        for part in implicit:
            part.stop, part.gradient = self.stop, self.gradient
            part.solver = self.solver or part.solver
            part.eval_stop = self.eval_stop or part.eval_stop


def bounded(
    steps: int = 4,
    phantom: int = 1,
    *,
    until: float | int | None = 0.8,
    damping: float = 0.8,
    checkpoint: bool = False,
    name: str = "bounded",
) -> Phase:
    """The paper's first phase: a few self-iterations without gradient, whatever the residual, then phantom steps.

    Training need not look at the residual, so a step costs the same for every batch. At evaluation the budget is four
    times that, to a relative tolerance of 0.05.

    Args:
        steps: self-iterations, at least 1.
        phantom: steps of the phantom gradient, at least 1.
        until: where the phase ends; the paper's 80 % of the tokens by default.
        damping: of the phantom steps, in (0, 1].
        checkpoint: whether the phantom steps recompute activations in the backward pass.
        name: for logs and checkpoints.

    Returns:
        The phase.

    Raises:
        ValueError: a number out of its range.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4: the (4+1)-model.

    Example:
        >>> bounded(4, 1).stop.max_steps, bounded(4, 1).eval_stop.max_steps
        (4, 16)
    """
    gradient = Phantom(phantom, damping, checkpoint)
    return Phase(name, until, Stop.exactly(steps), gradient, eval_stop=_eval_stop(steps))


def free(
    budget: int = 24,
    phantom: int = 4,
    *,
    rtol: float = 0.05,
    until: float | int | None = None,
    damping: float = 0.8,
    checkpoint: bool = False,
    name: str = "free",
) -> Phase:
    """The paper's second phase: solve to a tolerance without gradient, then phantom steps.

    At evaluation the budget is four times as large, to the same tolerance.

    Args:
        budget: self-iterations at most; the paper's 24 for Mamba2 by default, its Llamas have 32.
        phantom: steps of the phantom gradient, at least 1.
        rtol: relative tolerance.
        until: where the phase ends; None: with the run.
        damping: of the phantom steps, in (0, 1].
        checkpoint: whether the phantom steps recompute activations in the backward pass.
        name: for logs and checkpoints.

    Returns:
        The phase.

    Raises:
        ValueError: a number out of its range.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4: the (24+4)- and
        (32+4)-models.

    Example:
        >>> free(32).stop.max_steps, free(32).eval_stop.max_steps, free(32).gradient.steps
        (32, 128, 4)
    """
    gradient = Phantom(phantom, damping, checkpoint)
    return Phase(name, until, Stop(rtol=rtol, max_steps=budget), gradient, eval_stop=_eval_stop(budget, rtol))


def unrolled(steps: int = 8, *, until: float | int | None, checkpoint: bool = False, name: str = "unrolled") -> Phase:
    """A first phase for state tracking: differentiate a fixed number of self-iterations, as in an RNN of that depth.

    It learns fast where a problem needs several self-iterations at once; what it has learned is no fixed point yet, so
    a :func:`free` phase has to follow. At evaluation the budget is four times as large, to a relative tolerance of
    0.05.

    Args:
        steps: self-iterations, all of them differentiated, at least 1.
        until: where the phase ends; None: with the run.
        checkpoint: whether activations are recomputed in the backward pass.
        name: for logs and checkpoints.

    Returns:
        The phase.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> unrolled(8, until=0.4).gradient
        Unrolled(checkpoint=False)
    """
    return Phase(name, until, Stop.exactly(steps), Unrolled(checkpoint), eval_stop=_eval_stop(steps))


def _eval_stop(budget: int, rtol: float = 0.05) -> Stop:
    return Stop(rtol=rtol, max_steps=EVAL_FACTOR * budget)
