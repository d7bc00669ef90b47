"""The phases of a run in order, and what a checkpoint holds of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, Literal

from deqseq.check import check_type, checked, plain_number
from deqseq.training.phase import Phase

Unit = Literal["fraction", "steps", "tokens"]
"""What ends of phases and progress are counted in."""


@checked
@dataclass(frozen=True)
class Curriculum:
    """Phases in order, from cheap and bounded to free.

    In a plain loop: ``curriculum.at(progress).apply(model)`` before a step. With the Trainer of transformers:
    :class:`deqseq.integrations.huggingface.curriculum_callback.CurriculumCallback`.

    Args:
        phases: with names of their own, and ends that rise. The last end is None or, in fractions, 1. A last phase
            that ends in steps or tokens stays in force after that.
        unit: what the ends are counted in: ``"fraction"`` of the run, optimizer ``"steps"``, or ``"tokens"``.

    Raises:
        ValueError: no phases, a name twice, ends that do not rise or are no amount of the unit, an unknown unit, or a
            depth that rises over a phase without an end.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 4 (bounded and free
        phase).

    Example:
        The paper's curriculum, and one that is counted in tokens.

        >>> from deqseq.training import bounded, free
        >>> Curriculum((bounded(), free())).at(0.9).name
        'free'
        >>> Curriculum((bounded(until=8_000_000), free(32)), unit="tokens").at(7_999_999).name
        'bounded'
    """

    phases: Sequence[Phase]
    unit: Unit = "fraction"

    def __post_init__(self) -> None:
        for phase in self.phases:
            check_type("Curriculum.phases", phase, Phase, "free()")
        object.__setattr__(self, "phases", tuple(self.phases))
        self._check_ends([phase.until for phase in self.phases])
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"Curriculum.phases must have names of their own, got {names}")

    def at(self, progress: float | int) -> Phase:
        """The phase in force, with its budget drawn if it has a ``depth``.

        A draw depends only on the progress: it is the same in all processes and whenever it is repeated. The last phase
        stays in force after its end.

        Args:
            progress: how much of the run is done, in this curriculum's unit: a fraction in [0, 1], or a whole number
                of steps or tokens.

        Raises:
            ValueError: not an amount of the unit.
        """
        if not self._is_amount(progress):
            raise ValueError(f"progress must be {self._amount} (Curriculum.unit is {self.unit!r}), got {progress!r}")
        ends = self._ends
        place = next((i for i, end in enumerate(ends[:-1]) if progress < end), len(ends) - 1)
        begin = ends[place - 1] if place else 0
        return self.phases[place].drawn(progress, min(1.0, (progress - begin) / (ends[place] - begin)))

    def record(self, progress: float | int) -> dict[str, Any]:
        """What a checkpoint is to hold for :meth:`resumed`, as JSON: the phase in force, and the whole curriculum.

        Args:
            progress: how much of the run is done, as for :meth:`at`.

        Raises:
            TypeError: a solver or gradient with a field that is not a plain value, dataclass or function.

        Example:
            >>> from deqseq.training import bounded, free
            >>> record = Curriculum((bounded(), free())).record(0.9)
            >>> record["phase"], record["phases"][1]["solve"]["stop"]["max_steps"]
            ('free', 24)
        """
        return {"phase": self.at(progress).name, "progress": _described(progress, "progress"), **self._content}

    @checked
    def resumed(self, record: Mapping[str, Any] | None) -> Phase:
        """The phase that a checkpoint was written in; the curriculum must be the one that it was trained with.

        Args:
            record: what :meth:`record` gave.

        Raises:
            ValueError: the checkpoint has no record, or was trained with another curriculum; says what differs.

        Example:
            >>> from deqseq.training import bounded, free
            >>> record = Curriculum((bounded(), free(24))).record(0.9)
            >>> Curriculum((bounded(), free(32))).resumed(record)
            Traceback (most recent call last):
            ValueError: the curriculum is not the one that the checkpoint was trained with (phase 2
            solve.stop.max_steps: 24 -> 32; phase 2 eval_solve.stop.max_steps: 96 -> 128): resume with that one, or
            begin a new run from these weights
        """
        if record is None or not {"progress", *self._content} <= record.keys():
            raise ValueError("the checkpoint holds no phase: it was saved without phase=curriculum.record(progress)")
        mine = dict(_leaves(self._content))
        theirs = dict(_leaves({part: record[part] for part in self._content}))
        changes = [
            f"{name}: {_shown(theirs, name)} -> {_shown(mine, name)}"
            for name in {**mine, **theirs}
            if _shown(theirs, name) != _shown(mine, name)
        ]
        if changes:
            raise ValueError(
                f"the curriculum is not the one that the checkpoint was trained with ({'; '.join(changes)}): resume "
                "with that one, or begin a new run from these weights"
            )
        return self.at(record["progress"])

    @property
    def _content(self) -> dict[str, Any]:
        return {"unit": self.unit, "phases": [_described(phase, phase.name) for phase in self.phases]}

    @property
    def _ends(self) -> list[float | int]:
        whole = 1 if self.unit == "fraction" else math.inf
        return [whole if phase.until is None else phase.until for phase in self.phases]

    @property
    def _amount(self) -> str:
        return "a fraction in [0, 1]" if self.unit == "fraction" else f"a whole number of {self.unit}"

    def _is_amount(self, value: float | int) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        return 0 <= value <= 1 if self.unit == "fraction" else isinstance(value, Integral) and value >= 0

    def _check_ends(self, ends: list[float | int | None]) -> None:
        risen = self._ends
        last = not risen or (self.unit == "fraction" and risen[-1] != 1) or None in ends[:-1]
        if last or risen != sorted(set(risen)):
            rise = "rise to 1" if self.unit == "fraction" else "rise"
            raise ValueError(f"Curriculum.phases must have ends that {rise}, the last may be None, got {ends}")
        for end in ends:
            if end is not None and not self._is_amount(end):
                raise ValueError(f"Phase.until must be {self._amount} (Curriculum.unit is {self.unit!r}), got {end!r}")
        if self._ends[-1] == math.inf and (depth := self.phases[-1].depth) and depth.rise:
            raise ValueError(f"Phase.until must be given for a depth that rises until then, got None with {depth}")


def _described(value: object, where: str) -> Any:
    """A phase or one of its parts as JSON."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):
        return plain_number(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _described(getattr(value, field.name), f"{where}.{field.name}") for field in fields(value)}
        return {"class": type(value).__name__, **parts}
    if isinstance(value, tuple):
        return [_described(part, where) for part in value]
    if callable(value):  # an observer, as the report of an adjoint solve
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    raise TypeError(
        f"a checkpoint cannot hold {where} = {value!r}: it must be a plain value, a dataclass or a function"
    )


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested JSON with a name for messages."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, path + "." * (path != "" and path[-1] != " ") + key)
    elif isinstance(data, list):
        for index, value in enumerate(data, 1):
            yield from _leaves(value, f"phase {index} " if path == "phases" else f"{path}.{index}")
    else:
        yield path, data


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "nothing"
