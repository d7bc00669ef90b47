"""Does a model iterate at all, or is its first iteration already its fixed point?"""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.figures import COLOURS, Drawable, finish
from deqseq.diagnostics.jacobian import Pullback, check_count, gaussian, squared_gain
from deqseq.diagnostics.solved_model import solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.types import Mask, RowMask, State

if TYPE_CHECKING:
    import matplotlib.axes


class Verdict(Enum):
    """The conclusion of a :class:`Collapse`.

    Example:
        >>> [verdict.value for verdict in Verdict]
        ['iterates', 'predictions settle at once', 'collapsed', 'unsolved']
    """

    ITERATES = "iterates"
    """The map depends on its state, and predictions change after the first iteration."""
    PREDICTIONS_SETTLED = "predictions settle at once"
    """The state still moves, but the first iteration already predicts what the fixed point does."""
    COLLAPSED = "collapsed"
    """The map hardly depends on its state: the model is an explicit one."""
    UNSOLVED = "unsolved"
    """No row converged, so there is no fixed point to compare with."""


@dataclass(frozen=True)
class Collapse(Drawable):
    r"""What :func:`check_collapse` found; prints as a table and a verdict.

    Attributes:
        first_iteration: how much of the fixed point one iteration reaches, ``(batch,)``:
            :math:`1 - \lVert f(z_0) - z^* \rVert / \lVert z^* \rVert`; negative if it moves away.
        dependence: :math:`\lVert f(r) - z^* \rVert / \lVert z^* \rVert` for random states :math:`r` of the size of
            :math:`z^*`, ``(batch,)``; 0 if the map ignores its state.
        sensitivity: root mean square of :math:`\lVert J v \rVert / \lVert v \rVert` over random directions
            at :math:`z^*`, ``(batch,)``; 0 if the map ignores its state.
        agreement: share of the real tokens, ``(batch,)``, at which :math:`f(z_0)` predicts what :math:`z^*` does.
        converged: which rows converged, ``(batch,)``; the verdict is about these.
        limit: a row has collapsed if 1 - ``first_iteration``, ``dependence`` and ``sensitivity`` are at most this.
        agreed: predictions have settled if their mean ``agreement`` is at least this.
    """

    first_iteration: Float[Tensor, " batch"]
    dependence: Float[Tensor, " batch"]
    sensitivity: Float[Tensor, " batch"]
    agreement: Float[Tensor, " batch"]
    converged: RowMask
    limit: float
    agreed: float

    @property
    def collapsed(self) -> RowMask:
        """The converged rows in which the map hardly depends on its state."""
        numbers = torch.stack([1 - self.first_iteration, self.dependence, self.sensitivity])
        return (numbers <= self.limit).all(dim=0) & self.converged

    @property
    def verdict(self) -> Verdict:
        """The conclusion over all converged rows."""
        if not bool(self.converged.any()):
            return Verdict.UNSOLVED
        if bool(self.collapsed[self.converged].all()):
            return Verdict.COLLAPSED
        settled = self.agreement[self.converged].mean() >= self.agreed
        return Verdict.PREDICTIONS_SETTLED if bool(settled) else Verdict.ITERATES

    def __str__(self) -> str:
        names = ("first_iteration", "dependence", "sensitivity")
        columns = {name.replace("_", " "): texts(getattr(self, name), ".3f") for name in names}
        columns |= {"agreement": texts(self.agreement, ".1%"), "converged": yes_no(self.converged)}
        return f"{row_table(columns)}\nverdict: {self.verdict.value}"

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the four numbers on ``axis``: their mean as a bar, each row as a point, and the thresholds."""
        names = ("first_iteration", "dependence", "sensitivity", "agreement")
        limits = (1 - self.limit, self.limit, self.limit, self.agreed)
        for place, (name, limit) in enumerate(zip(names, limits, strict=True)):
            values = getattr(self, name).tolist()
            axis.bar(place, sum(values) / len(values), width=0.6, color=COLOURS[0], alpha=0.35)
            places = [place + 0.4 * ((row + 0.5) / len(values) - 0.5) for row in range(len(values))]
            axis.plot(places, values, "o", color=COLOURS[0], markersize=3.5)
            label = "threshold" if place == 0 else ""
            axis.hlines(limit, place - 0.4, place + 0.4, color=COLOURS[1], linestyle="--", linewidth=1.2, label=label)
        axis.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names], fontsize=8)
        finish(axis, "", "share or ratio", legend=True)


def check_collapse(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    samples: int = 4,
    seed: int = 0,
    limit: float = 0.05,
    agreed: float = 0.99,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> Collapse:
    """Compare the first iteration, the fixed point, and the map at random states, in eval mode.

    A model whose map has learned to ignore its state converges at once and makes every solver look excellent, but it is
    an explicit model.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        samples: random states and directions, at least 1.
        seed: of the random states and directions.
        limit: the largest part that the state may have in a collapsed model's value, in [0, 1]: see
            :class:`Collapse`.
        agreed: threshold of ``agreement``, in [0, 1].
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`Collapse`, on the CPU.

    Raises:
        TypeError: an explicit model.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or a number is out of its range.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> report = check_collapse(lm, torch.arange(6).reshape(2, 3))
        >>> report.collapsed, report.verdict is Verdict.COLLAPSED
        (tensor([False, False]), False)
    """
    check_count("samples", samples)
    for name, value in (("limit", limit), ("agreed", agreed)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    generator = torch.Generator().manual_seed(seed)
    with solved_model(model, ids, "check_collapse", mask=mask, solve=solve, fields=fields) as solved:
        f, z_star = solved.f, solved.value
        first = f(solved.start)
        dependence = torch.stack([_distance(f(_random(z_star, generator)), z_star) for _ in range(samples)])
        sensitivity = squared_gain(Pullback(f, z_star), samples, generator).sqrt()
        same = model.logits(first).argmax(dim=-1) == model.logits(z_star).argmax(dim=-1)
    real = torch.ones_like(same) if solved.padding.mask is None else solved.padding.mask
    count = real.sum(dim=1)
    sensitivity = sensitivity * (real.shape[1] / count).sqrt().to(sensitivity)  # over the real tokens
    numbers = (1 - _distance(first, z_star), dependence.mean(dim=0), sensitivity, (same & real).sum(dim=1) / count)
    first_iteration, far, gain, agreement = (number.cpu() for number in numbers)
    return Collapse(first_iteration, far, gain, agreement, solved.output.converged.cpu(), limit, agreed)


def _random(z_star: State, generator: torch.Generator) -> State:
    """A random state, each token of the size that it has at the fixed point."""
    random = gaussian(z_star, generator)
    return random * (z_star.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True))


def _distance(z: State, z_star: State) -> Float[Tensor, " batch"]:
    """The distance of each row from its fixed point, relative to the norm of that."""
    scale = z_star.flatten(1).norm(dim=1)
    return (z - z_star).flatten(1).norm(dim=1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)
