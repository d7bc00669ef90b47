"""The phases of a run in order."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deqseq.arguments import Within, check_integer, check_type, checked
from deqseq.training.phase import Phase


@checked
@dataclass(frozen=True)
class Curriculum:
    """The phases of a run in order, such as :func:`bounded`, then :func:`free`.

    In a plain loop, call ``curriculum.at(progress).apply(model)`` before each step. With the
    Trainer of transformers, use :class:`~deqseq.integrations.huggingface.CurriculumCallback`.

    Args:
        phases: phases with distinct names and increasing ends; the last end may be None, and in
            fractions must be None or 1. The last phase goes on after its end.
        unit: unit of the ends: ``"fraction"`` of the run, optimizer ``"steps"``, or ``"tokens"``.

    Raises:
        TypeError, ValueError: no phases, a name twice, ends that do not rise or do not fit the
            unit, or a depth that rises over a phase without an end.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4.

    Example:
        >>> import deqseq as dq
        >>> from deqseq.training import Curriculum, bounded, free
        >>> curriculum, model = Curriculum((bounded(), free())), dq.ImplicitModel(dq.Affine(4))
        >>> curriculum.at(0.9).apply(model)  # before a step, after 90 % of the run
        >>> model.solve.stop.max_steps
        24
        >>> Curriculum((bounded(until=8_000_000), free(32)), unit="tokens").at(7_999_999).name
        'bounded'
    """

    phases: Sequence[Phase]
    unit: Literal["fraction", "steps", "tokens"] = "fraction"

    def __post_init__(self) -> None:
        for phase in self.phases:
            check_type("Curriculum.phases", phase, Phase, "free()")
        object.__setattr__(self, "phases", tuple(self.phases))
        ends, wanted = self._ends(), "rise"
        rising = len(ends) > 0 and ends == sorted(set(ends))
        if self.unit == "fraction":
            wanted = "rise to 1"
            rising = rising and ends[-1] == 1
        if not rising:
            got = [phase.until for phase in self.phases]
            raise ValueError(
                f"Curriculum.phases must have ends that {wanted}, the last may be None, got {got}"
            )
        for phase in self.phases:
            if phase.until is not None:
                self._check_amount("Phase.until", phase.until)
        depth = self.phases[-1].depth
        if ends[-1] == math.inf and depth is not None and depth.rise:
            raise ValueError(
                "Phase.until must be given for a depth that rises until then, "
                f"got None with {depth}"
            )
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"Curriculum.phases must have names of their own, got {names}")

    def at(self, progress: float | int) -> Phase:
        """The current phase, with its budget drawn if it has a ``depth``.

        A draw depends only on the progress, so it is the same in all processes and in repeated
        calls. The last phase continues after its end.

        Args:
            progress: how much of the run is done, in this curriculum's unit: a fraction from 0 to
                1, or a whole number of steps or tokens.

        Raises:
            TypeError, ValueError: not an amount of the unit.
        """
        self._check_amount("progress", progress)
        ends = self._ends()
        place = bisect_right(ends[:-1], progress)
        begin, end = [0, *ends][place : place + 2]
        done = (progress - begin) / (end - begin)
        return self.phases[place].drawn(progress, min(1.0, done))

    def _ends(self) -> list[float | int]:
        whole = 1 if self.unit == "fraction" else math.inf
        return [phase.until or whole for phase in self.phases]

    def _check_amount(self, name: str, value: object) -> None:
        if self.unit == "fraction":
            Within("[0, 1]")(f"{name} as a fraction", value)
        else:
            check_integer(f"{name} in {self.unit}", value, 0)
