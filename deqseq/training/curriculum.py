"""Phases of training as data: how the fixed point is solved and differentiated, and until when."""

from dataclasses import dataclass

from deqseq.gradients import Gradient
from deqseq.models.implicit import ImplicitModel
from deqseq.stop import Stop


@dataclass(frozen=True)
class Phase:
    """One way of solving and differentiating.

    Args:
        name: for logs.
        until: fraction of the run at which it ends, in (0, 1].
        stop: tolerances and budget of the solve.
        gradient: the estimator.

    Raises:
        ValueError: ``until`` outside (0, 1].
    """

    name: str
    until: float
    stop: Stop
    gradient: Gradient

    def __post_init__(self) -> None:
        if not 0 < self.until <= 1:
            raise ValueError(f"Phase.until must lie in (0, 1], got {self.until!r}")

    def apply(self, model: ImplicitModel) -> None:
        """Make the model train this way from now on."""
        model.stop, model.gradient = self.stop, self.gradient


@dataclass(frozen=True)
class Curriculum:
    """Phases in order, from cheap and bounded to free.

    Args:
        phases: their ``until`` must rise and end at 1.

    Raises:
        ValueError: no phases, or ends that do not rise to 1.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4 (bounded and free
        phase).

    Example:
        >>> import deqseq as dq
        >>> bounded = Phase("bounded", 0.8, dq.Stop.exactly(4), dq.Phantom(1))
        >>> free = Phase("free", 1.0, dq.Stop(rtol=0.05, max_steps=24), dq.Phantom(4))
        >>> Curriculum((bounded, free)).at(0.9).name
        'free'
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.phases]
        if not ends or ends != sorted(set(ends)) or ends[-1] != 1:
            raise ValueError(f"Curriculum.phases must have ends that rise to 1, got {ends}")

    def at(self, progress: float) -> Phase:
        """The phase in force.

        Args:
            progress: the fraction of the run that is done, in [0, 1].

        Returns:
            The first phase that has not ended; the last one at the very end.
        """
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])
