"""The phases of a run in order, and what a checkpoint holds of them."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, Literal

from deqseq.arguments import Within, check_integer, check_type, checked
from deqseq.training.phase import Phase


@checked
@dataclass(frozen=True)
class Curriculum:
    """Phases in order, from cheap and bounded to free.

    In a plain loop: ``curriculum.at(progress).apply(model)`` before a step. With the Trainer of
    transformers: :class:`deqseq.integrations.huggingface.callbacks.CurriculumCallback`.

    Args:
        phases: phases with distinct names and increasing ends; the last end is None, or 1 in
            fractions.
        unit: unit of the ends: ``"fraction"`` of the run, optimizer ``"steps"``, or ``"tokens"``.

    Raises:
        TypeError, ValueError: no phases, a name twice, ends that do not rise or do not fit the
            unit, or a depth that rises over a phase without an end.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4:
        (4+1)-, (24+4)- and (32+4)-models.

    Example:
        >>> from deqseq.training import bounded, free
        >>> Curriculum((bounded(), free())).at(0.9).name
        'free'
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

    def record(self, progress: float | int) -> dict[str, Any]:
        """What a checkpoint needs for :meth:`resumed`, as JSON: progress, phase and curriculum.

        Args:
            progress: how much of the run is done, as in :meth:`at`.

        Raises:
            TypeError: a solver or gradient with a field that is not a plain value, dataclass or
                function.

        Example:
            >>> from deqseq.training import free
            >>> Curriculum((free(),)).record(0.9)["curriculum"]["phase 1 solve.stop.max_steps"]
            24
        """
        number: Any = progress  # may be one of NumPy's
        return {
            "phase": self.at(progress).name,
            "progress": plain_number(number),
            "curriculum": self._content(),
        }

    @checked
    def resumed(self, record: Mapping[str, Any] | None) -> Phase:
        """The phase of a checkpoint, which must have been trained with this curriculum.

        Args:
            record: what :meth:`record` gave.

        Raises:
            ValueError: the checkpoint has no record, or was trained with another curriculum; says
                what differs.

        Example:
            >>> from deqseq.training import bounded, free
            >>> record = Curriculum((bounded(), free(24))).record(0.9)
            >>> Curriculum((bounded(), free(32))).resumed(record)
            Traceback (most recent call last):
            ValueError: the curriculum is not the one that the checkpoint was trained with (phase 2
            solve.stop.max_steps: 24 -> 32; phase 2 eval_solve.stop.max_steps: 96 -> 128): resume
            with that one, or begin a new run from these weights
        """
        if record is None or not {"progress", "curriculum"} <= record.keys():
            raise ValueError(
                "the checkpoint holds no phase: it was saved without "
                "phase=curriculum.record(progress)"
            )
        check_type("the curriculum of record", record["curriculum"], Mapping)
        trained = {name: repr(value) for name, value in record["curriculum"].items()}
        current = {name: repr(value) for name, value in self._content().items()}
        changes = [
            f"{name}: {trained.get(name, 'nothing')} -> {current.get(name, 'nothing')}"
            for name in current | trained
            if trained.get(name) != current.get(name)
        ]
        if changes:
            raise ValueError(
                "the curriculum is not the one that the checkpoint was trained with "
                f"({'; '.join(changes)}): resume with that one, or begin a new run from these "
                "weights"
            )
        return self.at(record["progress"])

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"unit": self.unit}
        for place, phase in enumerate(self.phases, 1):
            for field in fields(phase):
                name = f"phase {place} {field.name}"
                content.update(_leaves(name, getattr(phase, field.name)))
        return content

    def _ends(self) -> list[float | int]:
        whole = 1 if self.unit == "fraction" else math.inf
        return [phase.until or whole for phase in self.phases]

    def _check_amount(self, name: str, value: object) -> None:
        if self.unit == "fraction":
            Within("[0, 1]")(f"{name} as a fraction", value)
        else:
            check_integer(f"{name} in {self.unit}", value, 0)


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Every plain value in a field of a phase, with its path."""
    if value is None or isinstance(value, bool | str):
        yield path, value
    elif isinstance(value, Real):
        yield path, plain_number(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{path}.class", type(value).__name__
        for field in fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif callable(value):  # such as Implicit.report
        yield path, f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    else:
        raise TypeError(
            f"a checkpoint cannot hold {path} = {value!r}: it must be plain, a dataclass or a "
            "function"
        )


def plain_number(value: Real) -> int | float:
    """A number as JSON has it, also from one of NumPy's."""
    return int(value) if isinstance(value, Integral) else float(value)
