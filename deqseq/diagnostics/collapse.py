"""Does a model iterate at all, or is its first self-iteration already its fixed point?"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.figures import COLOURS, Drawable, finish
from deqseq.diagnostics.jacobian import Pullback, gaussian, squared_gain
from deqseq.diagnostics.point import ModelPoint, fixed_point_of
from deqseq.diagnostics.text import SHOWN, rest, text_table
from deqseq.evaluate import evaluate
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.solution import Status
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import RowMask, State

if TYPE_CHECKING:
    import matplotlib.axes


class Verdict(Enum):
    """What a :class:`Collapse` comes to.

    Example:
        >>> [verdict.value for verdict in Verdict]
        ['iterates', 'predictions settle at once', 'collapsed', 'unsolved']
    """

    ITERATES = "iterates"
    """The map depends on its state, and predictions change after the first self-iteration."""
    PREDICTIONS_SETTLED = "predictions settle at once"
    """The state still moves, but the first self-iteration already predicts what the fixed point does."""
    COLLAPSED = "collapsed"
    """The map hardly depends on its state: the model is an explicit one."""
    UNSOLVED = "unsolved"
    """No row converged, so there is no fixed point to compare with."""


@dataclass(frozen=True)
class Collapse(Drawable):
    r"""What :func:`check_collapse` found; printed, it is a table and a verdict.

    Attributes:
        first_step: how much of the fixed point is there after one self-iteration, ``(batch,)``:
            :math:`1 - \lVert f(z_0) - z^* \rVert / \lVert z^* \rVert`; negative where the first one leads away.
        dependence: :math:`\lVert f(r) - z^* \rVert / \lVert z^* \rVert` for random states :math:`r` of the size of
            :math:`z^*`, ``(batch,)``; 0 where the map ignores its state.
        sensitivity: root mean square of :math:`\lVert J v \rVert / \lVert v \rVert` over random directions
            at :math:`z^*`, ``(batch,)``; 0 where the map ignores its state.
        agreement: share of the real tokens, ``(batch,)``, at which :math:`f(z_0)` predicts what :math:`z^*` does.
        converged: which rows did, ``(batch,)``; the others have no say.
        share: a row has collapsed only where ``first_step`` is at least this, and ``dependence`` at most the rest.
        limit: and where ``sensitivity`` is at most this.
        agreed: predictions have settled where ``agreement`` is at least this.

    Example:
        >>> half = torch.tensor([0.5])
        >>> report = Collapse(half, half, half, half, torch.tensor([True]), share=0.95, limit=0.05, agreed=0.99)
        >>> report.verdict
        <Verdict.ITERATES: 'iterates'>
    """

    first_step: Float[Tensor, " batch"]
    dependence: Float[Tensor, " batch"]
    sensitivity: Float[Tensor, " batch"]
    agreement: Float[Tensor, " batch"]
    converged: RowMask
    share: float
    limit: float
    agreed: float

    @property
    def collapsed(self) -> RowMask:
        """The rows in which the map hardly depends on its state; none that did not converge."""
        ignores = (self.dependence <= 1 - self.share) & (self.sensitivity <= self.limit)
        return (self.first_step >= self.share) & ignores & self.converged

    @property
    def verdict(self) -> Verdict:
        """That of the solved rows together."""
        if not bool(self.converged.any()):
            return Verdict.UNSOLVED
        if bool(self.collapsed[self.converged].all()):
            return Verdict.COLLAPSED
        settled = self.agreement[self.converged].mean() >= self.agreed
        return Verdict.PREDICTIONS_SETTLED if bool(settled) else Verdict.ITERATES

    def __str__(self) -> str:
        lines = []
        for row in range(min(SHOWN, len(self.converged))):
            shares = (self.first_step, self.dependence, self.sensitivity)
            numbers = [f"{numbers[row].item():.3f}" for numbers in shares]
            last = (f"{self.agreement[row].item():.1%}", "yes" if self.converged[row] else "no")
            lines.append((str(row), *numbers, *last))
        header = ("row", "first step", "dependence", "sensitivity", "agreement", "converged")
        return f"{text_table(header, lines)}{rest(len(self.converged))}\nverdict: {self.verdict.value}"

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the four numbers on ``axis``: their mean as a bar, each row as a point, and the thresholds."""
        names = ("first_step", "dependence", "sensitivity", "agreement")
        limits = (self.share, 1 - self.share, self.limit, self.agreed)
        for place, (name, limit) in enumerate(zip(names, limits, strict=True)):
            values = getattr(self, name).tolist()
            axis.bar(place, sum(values) / len(values), width=0.6, color=COLOURS[0], alpha=0.35)
            spread = [place + 0.4 * ((row + 0.5) / len(values) - 0.5) for row in range(len(values))]
            axis.plot(spread, values, "o", color=COLOURS[0], markersize=3.5)
            label = "threshold" if place == 0 else "_others"
            axis.hlines(limit, place - 0.4, place + 0.4, color=COLOURS[1], linestyle="--", linewidth=1.2, label=label)
        axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
        finish(axis, "", "share or ratio", legend=True)


def check_collapse(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    samples: int = 4,
    seed: int = 0,
    share: float = 0.95,
    limit: float = 0.05,
    agreed: float = 0.99,
) -> Collapse:
    """Compare the first self-iteration, the fixed point and the map at random states, in eval mode.

    A model whose map has learned to ignore its state converges at once, and every solver looks excellent; but it is an
    explicit model. What counts is whether the map depends on its state at all, and whether predictions do.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        solver: instead of the model's own.
        stop: instead of the model's own.
        samples: random states and directions, at least 1.
        seed: of those.
        share: threshold of ``first_step``, and one minus that of ``dependence``, in (0, 1].
        limit: threshold of ``sensitivity``, at least 0.
        agreed: threshold of ``agreement``, in (0, 1].

    Returns:
        A :class:`Collapse`, on the CPU.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary, or a number out of its range.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> check_collapse(lm, torch.arange(6).reshape(2, 3)).collapsed
        tensor([False, False])
    """
    _check(samples, share, limit, agreed)
    generator = torch.Generator().manual_seed(seed)
    with fixed_point_of(model, ids, asker="check_collapse", mask=mask, solver=solver, stop=stop) as point:
        first = evaluate(point.f, point.start)
        dependence = torch.stack([_distance(_at_random(point, generator), point.value) for _ in range(samples)])
        sensitivity = squared_gain(Pullback(point.f, point.value), samples, generator).sqrt()
        same = model.logits(first).argmax(dim=-1) == model.logits(point.value).argmax(dim=-1)
    real = torch.ones_like(same) if point.padding.real is None else point.padding.real
    numbers = (
        1 - _distance(first, point.value),
        dependence.mean(dim=0),
        sensitivity * (real.shape[1] / real.sum(dim=1)).sqrt().to(sensitivity),  # over the real tokens
        (same & real).sum(dim=1) / real.sum(dim=1),
    )
    assert point.output.status is not None
    converged = point.output.status == Status.CONVERGED
    first_step, far, gain, agreement = (number.cpu() for number in numbers)
    return Collapse(first_step, far, gain, agreement, converged.cpu(), share, limit, agreed)


def _at_random(point: ModelPoint, generator: torch.Generator) -> State:
    """The map at a random state, each token of the size that it has at the fixed point."""
    random = gaussian(point.value, generator)
    size = point.value.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True)
    return evaluate(point.f, random * size)


def _distance(z: State, z_star: State) -> Float[Tensor, " batch"]:
    """How far a row is from its fixed point, relative to the size of that."""
    scale = z_star.flatten(1).norm(dim=1)
    return (z - z_star).flatten(1).norm(dim=1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _check(samples: int, share: float, limit: float, agreed: float) -> None:
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"samples must be an integer >= 1, got {samples!r}")
    for name, value in (("share", share), ("agreed", agreed)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {value!r}")
    if not limit >= 0:
        raise ValueError(f"limit must be >= 0, got {limit!r}")
