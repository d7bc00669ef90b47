"""Does a model iterate at all, or is its first iteration already its fixed point?"""

from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.check import check_integer, check_number
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.solved_model import SolvedModel, check_call, seeded, solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.types import Mask, RowMask, State


@dataclass(frozen=True)
class Collapse:
    r"""What :func:`check_collapse` found; prints as a table and a verdict.

    Attributes:
        first_iteration: how much of the fixed point one iteration reaches, ``(batch,)``:
            :math:`1 - \lVert f(z_0) - z^* \rVert / \lVert z^* \rVert`; negative if it moves away.
        dependence: :math:`\lVert f(r) - z^* \rVert / \lVert z^* \rVert` for random states :math:`r` of the size of
            :math:`z^*`, ``(batch,)``; 0 if the map ignores its state.
        agreement: share of the real tokens, ``(batch,)``, at which :math:`f(z_0)` predicts what :math:`z^*` does.
        converged: which rows converged, ``(batch,)``; the verdict is about these.
        limit: a row has collapsed if 1 - ``first_iteration`` and ``dependence`` are at most this.
        agreed: predictions have settled if their mean ``agreement`` is at least this.
    """

    first_iteration: Float[Tensor, " batch"]
    dependence: Float[Tensor, " batch"]
    agreement: Float[Tensor, " batch"]
    converged: RowMask
    limit: float
    agreed: float

    @property
    def collapsed(self) -> RowMask:
        """The converged rows in which the map hardly depends on its state."""
        return (1 - self.first_iteration <= self.limit) & (self.dependence <= self.limit) & self.converged

    @property
    def verdict(self) -> Literal["iterates", "predictions settle at once", "collapsed", "unsolved"]:
        """The conclusion over all converged rows; ``"unsolved"`` if there are none.

        ``"collapsed"``: the map hardly depends on its state, so the model is an explicit one. ``"predictions settle at
        once"``: the state moves, but the first iteration predicts what the fixed point does.
        """
        if not bool(self.converged.any()):
            return "unsolved"
        if bool(self.collapsed[self.converged].all()):
            return "collapsed"
        settled = self.agreement[self.converged].mean() >= self.agreed
        return "predictions settle at once" if bool(settled) else "iterates"

    def __str__(self) -> str:
        columns = {"first iteration": texts(self.first_iteration, ".3f"), "dependence": texts(self.dependence, ".3f")}
        columns |= {"agreement": texts(self.agreement, ".1%"), "converged": yes_no(self.converged)}
        return f"{row_table(columns)}\nverdict: {self.verdict}"


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
        samples: random states, at least 1.
        seed: of the random states.
        limit: a row has collapsed if ``1 - first_iteration`` and ``dependence`` are at most this; in [0, 1].
        agreed: threshold of ``agreement``, in [0, 1].
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`Collapse`, on the CPU.

    Raises:
        TypeError: an explicit model, or an argument of the wrong type.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or a number is out of its range.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> report = check_collapse(lm, torch.arange(6).reshape(2, 3))
        >>> report.collapsed, report.verdict == "collapsed"
        (tensor([False, False]), False)
    """
    mask, config = check_call(model, ids, mask, solve, fields)
    check_integer("samples", samples, 1)
    check_number("limit", limit, "[0, 1]")
    check_number("agreed", agreed, "[0, 1]")
    generator = seeded(seed)
    with solved_model(model, ids, mask, config) as solved:
        return collapse_of(solved, samples, generator, limit, agreed)


def collapse_of(solved: SolvedModel, samples: int, generator: torch.Generator, limit: float, agreed: float) -> Collapse:
    """The numbers of a model at its fixed point."""
    f, z_star, real = solved.f, solved.value, solved.args.mask
    first = f(solved.start)
    dependence = torch.stack([_distance(f(_random(z_star, generator)), z_star) for _ in range(samples)]).mean(dim=0)
    changed = solved.logits(first).argmax(dim=-1) != solved.logits(z_star).argmax(dim=-1)
    changed = changed if real is None else changed & real
    agreement = 1 - changed.sum(dim=1) / solved.mask.sum(dim=1)
    first_iteration, converged = 1 - _distance(first, z_star), solved.output.converged
    return Collapse(first_iteration.cpu(), dependence.cpu(), agreement.cpu(), converged.cpu(), limit, agreed)


def _random(z_star: State, generator: torch.Generator) -> State:
    """A random state, each token of the size that it has at the fixed point."""
    random = torch.randn(z_star.shape, generator=generator).to(z_star)
    return random * (z_star.norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True))


def _distance(z: State, z_star: State) -> Float[Tensor, " batch"]:
    """The distance of each row from its fixed point, relative to the norm of that."""
    scale = z_star.flatten(1).norm(dim=1)
    return (z - z_star).flatten(1).norm(dim=1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)
