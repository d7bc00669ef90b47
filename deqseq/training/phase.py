"""One phase of training: how the fixed point is solved and differentiated, and until when."""

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Any, Literal

from torch import nn

from deqseq.arguments import NonNegativeInt, PositiveInt, Within, check_integer, checked
from deqseq.config import SolveConfig
from deqseq.gradients import Gradient, Phantom, Unrolled
from deqseq.models.base import ExplicitModel
from deqseq.models.implicit import ImplicitModel


@checked
@dataclass(frozen=True)
class PoissonLogNormal:
    r"""The log-normal Poisson distribution of iterations that recurrent-depth models train with.

    .. math:: n = 1 + \mathrm{Poisson}(\lambda), \qquad \ln \lambda \sim \mathcal{N}(\ln m -
    \sigma^2 / 2,\ \sigma^2)

    The mean is :math:`m + 1`, the variance :math:`m + m^2 (e^{\sigma^2} - 1)`. A draw depends
    only on the seed and the progress of the run: it is the same in all processes, and a resumed run
    can repeat it without saved state.

    Args:
        mean: :math:`m`, above 0 and at most a million; ``mean_recurrence`` of the published models.
        sigma: standard deviation of :math:`\ln \lambda`, 0 to 2.
        rise: how :math:`m` rises from 1 to ``mean`` when a share :math:`t` of its phase is done:
            ``"linear"``, as :math:`t`, or ``"1-sqrt"``, as :math:`1 - \sqrt{1 - t}`. Default:
            :math:`m` is constant.
        largest: upper limit of the draws. Default: no limit.
        seed: seed of the draws.
        smallest: lower limit of the draws.

    Raises:
        ValueError: ``largest`` is below ``smallest``, or a number is out of its range.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth
        Approach, NeurIPS 2025, arXiv 2502.05171. McLeish et al., Teaching Pretrained Language
        Models to Think Deeper with Retrofitted Recurrence, 2025, arXiv 2511.07384: the rise.

    Example:
        >>> from deqseq.training import PoissonLogNormal
        >>> [PoissonLogNormal(32).draw(step) for step in range(8)]
        [25, 21, 41, 27, 11, 23, 34, 40]
        >>> [PoissonLogNormal(32, rise="linear").draw(step, step / 8) for step in range(8)]
        [2, 5, 13, 15, 7, 17, 29, 37]
    """

    mean: Annotated[float | int, Within("(0, 1e6]")]
    sigma: Annotated[float | int, Within("[0, 2]")] = 0.5
    rise: Literal["linear", "1-sqrt"] | None = None
    largest: PositiveInt | None = None
    seed: NonNegativeInt = 0
    smallest: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.largest is not None and self.largest < self.smallest:
            raise ValueError(
                f"PoissonLogNormal.largest must be at least smallest, {self.smallest}, "
                f"got {self.largest}"
            )

    @checked
    def draw(
        self,
        progress: Annotated[float | int, Within("[0, inf)")],
        done: Annotated[float | int, Within("[0, 1]")] = 1.0,
    ) -> int:
        """The number of iterations of a training step, at least 1.

        Args:
            progress: progress of the run before the step, in any unit; draws at different progress
                are independent.
            done: share of the phase that is done, 0 to 1; a rising mean depends on it.
        """
        chance = Random(f"{self.seed} {float(progress)}")  # Random hashes a text cryptographically
        risen = {None: 1, "linear": done, "1-sqrt": 1 - math.sqrt(1 - done)}[self.rise]
        mean = self.mean if risen == 1 else self.mean * risen + 1 - risen
        rate = chance.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
        # count the arrivals of a Poisson process before ``rate``
        steps, arrival = 1, chance.expovariate(1)
        while arrival < rate and steps != self.largest:
            steps += 1
            arrival += chance.expovariate(1)
        return max(steps, self.smallest)


End = Annotated[float | int, Within("(0, inf)")] | None


@checked
@dataclass(frozen=True)
class Phase:
    """A part of training with one way of solving and differentiating.

    :func:`bounded`, :func:`free` and :func:`unrolled` make the usual ones.

    Args:
        name: for logs and checkpoints.
        until: where it ends, in the unit of its :class:`Curriculum`. None: it ends with the run.
        solve: how the fixed point is found and differentiated in training.
        eval_solve: the same in eval mode. Default: ``solve``.
        depth: distribution of the budget ``solve.stop.max_steps``, which
            :meth:`deqseq.training.Curriculum.at` draws for every training step. Eval mode does not
            change. Default: the budget is fixed.

    Raises:
        TypeError, ValueError: an argument of the wrong type, an empty name, or an end that is not
            above 0.

    Example:
        >>> from deqseq.training import Phase
        >>> import deqseq as dq
        >>> Phase(
        ...     "exact", 0.9, dq.SolveConfig(stop=dq.Stop(rtol=1e-6), gradient=dq.Implicit())
        ... ).until
        0.9
    """

    name: str
    until: End
    solve: SolveConfig
    eval_solve: SolveConfig | None = None
    depth: PoissonLogNormal | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("Phase.name must not be empty, got ''")

    def drawn(self, progress: float | int, done: float | int = 1.0) -> "Phase":
        """The phase with the budget of one update, at ``progress`` and a share ``done`` of it."""
        if self.depth is None:
            return self
        stop, budget = self.solve.stop, self.depth.draw(progress, done)
        check_every = stop.check_every
        if check_every >= stop.max_steps:  # only the last iteration is checked, as in Stop.exactly
            check_every = budget
        stop = replace(stop, max_steps=budget, check_every=check_every)
        solve, eval_solve = replace(self.solve, stop=stop), self.eval_solve or self.solve
        return replace(self, solve=solve, eval_solve=eval_solve, depth=None)

    @checked
    def apply(self, model: nn.Module) -> None:
        """Set how every implicit model inside ``model`` is solved and differentiated.

        An :class:`ExplicitModel` does not change, so that a baseline can use the same loop.

        Args:
            model: an :class:`ImplicitModel`, an :class:`ExplicitModel`, or a module that contains
                one.

        Raises:
            TypeError: the module contains neither.
            ValueError: the phase has a ``depth`` that has not been drawn; or the model starts its
                solves at its input, and the phase does not, so the model may never see its tokens.
        """
        if self.depth is not None:
            raise ValueError(
                f"Phase.depth of {self.name!r} must be drawn: apply what Curriculum.at(progress) "
                "returns"
            )
        parts = list(model.modules())
        implicit = [part for part in parts if isinstance(part, ImplicitModel)]
        if not implicit and not any(isinstance(part, ExplicitModel) for part in parts):
            raise TypeError(
                "a phase applies to an ImplicitModel or a module with one inside (an "
                "ExplicitModel is left as it is), "
                f"got {type(model).__name__} without either"
            )
        for part in implicit:
            if _starts(part) == {"input"} != _starts(self):
                raise ValueError(
                    f"phase {self.name!r} must begin its solves at the input, as the model does, "
                    f"got start={self.solve.start!r}: a model whose injection is not trained yet "
                    "would not see its tokens. "
                    "Make the phase with base=model.solve, or give the model another start first"
                )
        for part in implicit:
            part.solve, part.eval_solve = self.solve, self.eval_solve


def _starts(way: Phase | ImplicitModel) -> set[Any]:
    """Where the solves begin, in training and in eval mode."""
    eval_solve = way.eval_solve or way.solve
    return {way.solve.start, eval_solve.start}


@checked
def bounded(
    steps: PositiveInt = 4,
    phantom: PositiveInt = 1,
    *,
    until: End = 0.8,
    name: str = "bounded",
    base: SolveConfig = SolveConfig(),
    eval_base: SolveConfig | None = None,
) -> Phase:
    """The paper's first phase: a fixed number of iterations without gradient, then phantom steps.

    Training does not check the residual, so a step costs the same for every batch. In eval mode the
    budget is four times as large, with a relative tolerance of 0.05.

    Args:
        steps: iterations.
        phantom: steps of :class:`deqseq.Phantom`; for another gradient write a :class:`Phase`.
        until: where the phase ends, in the unit of its :class:`Curriculum`. Default: 0.8, a
            fraction of the run (in the paper, 80 % of the tokens); give it for steps and tokens.
        name: for logs and checkpoints.
        base: gives the solver, the sweep, the start, and of its ``stop`` the norm and the limit of
            divergence; its gradient, budget and tolerances are not used.
        eval_base: the same in eval mode, but of its ``stop`` everything except budget and ``rtol``.
            Default: ``base``.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    Example:
        >>> from deqseq.training import bounded
        >>> bounded(4, 1).solve.stop.max_steps, bounded(4, 1).eval_solve.stop.max_steps
        (4, 16)
    """
    return _phase(name, until, base, eval_base, steps, Phantom(phantom))


@checked
def free(
    budget: PositiveInt = 24,
    phantom: PositiveInt = 4,
    *,
    rtol: Annotated[float | int, Within("[0, inf)")] = 0.05,
    until: End = None,
    name: str = "free",
    base: SolveConfig = SolveConfig(),
    eval_base: SolveConfig | None = None,
) -> Phase:
    """The paper's second phase: solve to a tolerance without gradient, then phantom steps.

    In eval mode the budget is four times as large, with the same tolerance.

    Args:
        budget: largest number of iterations. Default: 24, as in the paper for Mamba2; its Llamas
            have 32.
        phantom: steps of :class:`deqseq.Phantom`; for another gradient write a :class:`Phase`.
        rtol: relative tolerance.
        until: where the phase ends. None: it ends with the run.
        name: for logs and checkpoints.
        base: gives the solver, the sweep, the start, and of its ``stop`` everything except budget
            and ``rtol``; its gradient is not used.
        eval_base: the same in eval mode. Default: ``base``.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    Example:
        >>> from deqseq.training import free
        >>> phase = free(32)
        >>> phase.solve.stop.max_steps, phase.eval_solve.stop.max_steps
        (32, 128)
    """
    return _phase(name, until, base, eval_base, budget, Phantom(phantom), rtol)


@checked
def unrolled(
    steps: PositiveInt | PoissonLogNormal = 8,
    *,
    until: End,
    last: PositiveInt | None = None,
    name: str = "unrolled",
    base: SolveConfig = SolveConfig(),
    eval_base: SolveConfig | None = None,
) -> Phase:
    """Differentiate a fixed or drawn number of iterations, all of them or the last ones.

    As a first phase for state tracking it learns fast if a problem needs several iterations. The
    result is not a fixed point yet, so a :func:`free` phase has to follow. Recurrent-depth models
    are trained with a drawn number of iterations, of which the last 8 are differentiated. In eval
    mode the budget is four times ``steps``, or four times their mean, and the relative tolerance
    0.05; gradients in eval mode, if any, are of all iterations.

    Args:
        steps: number of iterations, at least 1; or a distribution that is drawn from in every
            training step.
        until: where the phase ends. None: it ends with the run.
        last: how many of the last iterations are differentiated. Default: all.
        name: for logs and checkpoints.
        base: as for :func:`bounded`.
        eval_base: as for :func:`bounded`.

    Raises:
        ValueError: ``last`` is larger than a fixed number of ``steps``.

    Example:
        >>> from deqseq.training import PoissonLogNormal, unrolled
        >>> unrolled(8, until=0.4).solve.gradient
        Unrolled(checkpoint=False, last=None)
        >>> unrolled(PoissonLogNormal(32), last=8, until=None).solve.gradient
        Unrolled(checkpoint=False, last=8)
    """
    if isinstance(steps, PoissonLogNormal):
        depth, budget = steps, max(1, round(steps.mean))
    else:
        depth, budget = None, steps
        if last is not None:
            check_integer("last", last, 1, budget)
    phase = _phase(name, until, base, eval_base, budget, Unrolled())
    solve = replace(phase.solve, gradient=Unrolled(last=last))
    return replace(phase, solve=solve, depth=depth)


def _phase(
    name: str,
    until: End,
    base: SolveConfig,
    eval_base: SolveConfig | None,
    budget: int,
    gradient: Gradient,
    rtol: float | None = None,
) -> Phase:
    """A phase whose budget in eval mode is four times that of training, as in the paper.

    Without a tolerance, training uses the whole budget as :meth:`deqseq.Stop.exactly` does, and
    eval mode has a tolerance of 0.05.
    """
    if rtol is None:
        rtol = 0.05
        stop = replace(base.stop, rtol=0.0, atol=0.0, max_steps=budget, check_every=budget)
    else:
        stop = replace(base.stop, rtol=rtol, max_steps=budget)
    solve = replace(base, stop=stop, gradient=gradient)
    eval_base = eval_base or base
    eval_stop = replace(eval_base.stop, rtol=rtol, max_steps=4 * int(budget))
    return Phase(name, until, solve, replace(eval_base, stop=eval_stop, gradient=gradient))
