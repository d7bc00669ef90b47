"""How far a map expands around its fixed point: the spectral radius of its Jacobian."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.arnoldi import Ritz, ritz_values
from deqseq.diagnostics.figures import COLOURS, GREY, Drawable, finish, row_label
from deqseq.diagnostics.jacobian import Pullback, check_point, gaussian
from deqseq.diagnostics.point import fixed_point_of
from deqseq.diagnostics.text import SHOWN, rest, text_table
from deqseq.evaluate import evaluate
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.norms import measure
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.sweeps.base import TokenMap
from deqseq.types import FixedPointMap, RowMask, State

if TYPE_CHECKING:
    import matplotlib.axes

Part = Literal["sample", "token"]


@dataclass(frozen=True)
class SpectralRadius(Drawable):
    """What :func:`spectral_radius` found; printed, it is a table.

    Attributes:
        eigenvalues: approximations of the outer eigenvalues, ``(batch, count)`` or ``(batch, length, count)``; not a
            number at padding and where the Jacobian is not finite.
        error: how far the Jacobian would have to change, in norm, for the largest of them to be exact; a large one
            asks for more steps. ``(batch,)`` or ``(batch, length)``.
        residual: relative residual of the point, ``(batch,)``: the largest over the tokens.
        tolerance: above this residual the point is no fixed point, and the radius says little about the solve.

    Example:
        >>> report = spectral_radius(lambda z: 0.5 * z, torch.zeros(1, 2))
        >>> report.damped(0.8)      # of 0.2 + 0.8 * 0.5
        tensor([0.6000])
    """

    eigenvalues: Complex[Tensor, "batch *tokens count"]
    error: Float[Tensor, "batch *tokens"]
    residual: Float[Tensor, " batch"]
    tolerance: float

    @property
    def radius(self) -> Float[Tensor, "batch *tokens"]:
        """The largest absolute eigenvalue of each row or token: plain iteration contracts near it when below 1."""
        return self.eigenvalues.abs().amax(dim=-1)

    @property
    def per_row(self) -> Float[Tensor, " batch"]:
        """The largest radius of each row: for a causal map that of the whole sequence."""
        return _largest_token(self.radius)

    @property
    def at_fixed_point(self) -> RowMask:
        """Which rows were looked at where they are solved."""
        return self.residual <= self.tolerance

    def damped(self, damping: float) -> Float[Tensor, "batch *tokens"]:
        r"""The radius of the damped iteration, :math:`\max |1 - \tau + \tau \lambda|`.

        Args:
            damping: :math:`\tau` of :class:`~deqseq.Relaxed`.

        Returns:
            ``(batch,)`` or ``(batch, length)``.
        """
        return (1 - damping + damping * self.eigenvalues).abs().amax(dim=-1)

    def __str__(self) -> str:
        rows, error = self.per_row.tolist(), _largest_token(self.error).tolist()
        lines = []
        for row in range(min(SHOWN, len(rows))):
            where = "yes" if self.at_fixed_point[row] else "no"
            numbers = (f"{rows[row]:.3f}", f"{error[row]:.0e}", f"{self.residual[row].item():.1e}")
            lines.append((str(row), *numbers, where))
        header = ("row", "spectral radius", "error", "residual", "fixed point")
        return text_table(header, lines) + rest(len(rows))

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw radii on ``axis``, dotted off the fixed point; for whole rows eigenvalues, hollow off it."""
        if self.error.ndim == 2:
            for row, radius in enumerate(self.radius.tolist()):
                line = "-" if self.at_fixed_point[row] else ":"
                style = {"color": COLOURS[row % len(COLOURS)], "linewidth": 1, "label": row_label(row, len(self.error))}
                axis.plot(radius, line, marker=".", **style)
            axis.axhline(1, color=GREY, linewidth=1, linestyle="--", label="expands above")
            axis.set_ylim(bottom=0)
            finish(axis, "token", "spectral radius", legend=True)
            return
        angles = torch.linspace(0, 2 * torch.pi, 200)
        axis.plot(angles.cos().tolist(), angles.sin().tolist(), "--", color=GREY, linewidth=1)
        for row, values in enumerate(self.eigenvalues):
            fill = COLOURS[row % len(COLOURS)] if self.at_fixed_point[row] else "none"
            edge = COLOURS[row % len(COLOURS)]
            axis.scatter(values.real.tolist(), values.imag.tolist(), s=14, facecolors=fill, edgecolors=edge)
        axis.set_aspect("equal", adjustable="datalim")
        finish(axis, "eigenvalues, real part", "imaginary part")


def spectral_radius(
    f: FixedPointMap,
    z_star: State,
    *,
    steps: int = 32,
    seed: int = 0,
    per: Part = "sample",
    tolerance: float = 1e-2,
) -> SpectralRadius:
    r"""The largest absolute eigenvalue of a map's Jacobian at a point.

    Below 1, plain iteration converges near the point, by this factor a self-iteration in the long run. The Jacobian
    of a causal map is block triangular over the tokens, so its eigenvalues are those of its diagonal blocks
    :math:`\partial f_t / \partial z_t`. With ``per="token"`` they are found block by block, each against the settled
    tokens before it: that is exact with as many steps as the state is wide. With ``per="sample"`` the method sees the
    whole sequence, where what a token hands on to the next can look like an eigenvalue until the steps outnumber the
    tokens (``error`` shows it).

    Args:
        f: the map. With ``per="token"`` it must be causal; a :class:`~deqseq.backbones.BackboneMap` is taken apart by
            its cache, any other map is differentiated over the whole sequence for each token.
        z_star: the point, ``(batch, *event)``; for ``per="token"`` ``(batch, length, dim)``.
        steps: products with the Jacobian, at least 1; exact once there are as many as dimensions.
        seed: of the random vectors to begin with.
        per: one radius a row, or one a token.
        tolerance: the relative residual up to which the point counts as a fixed point.

    Returns:
        A :class:`SpectralRadius`, on the CPU.

    Raises:
        TypeError, ValueError: a point that is none, no steps, or tokens asked of a state without any.

    Example:
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])      # a complex pair: 0.9i and -0.9i
        >>> spectral_radius(lambda z: z @ turn, torch.zeros(3, 2)).radius
        tensor([0.9000, 0.9000, 0.9000])
    """
    check_point(z_star)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be an integer >= 1, got {steps!r}")
    if per not in get_args(Part):
        raise ValueError(f"per must be one of {get_args(Part)}, got {per!r}")
    if per == "token" and z_star.ndim != 3:
        raise ValueError(f'per="token" needs z_star of shape (batch, length, dim), got {tuple(z_star.shape)}')
    generator = torch.Generator().manual_seed(seed)
    z_star = z_star.detach()
    with torch.no_grad():
        residual = measure(z_star, evaluate(f, z_star), Stop()).residual.cpu()
    if per == "sample":
        outer = ritz_values(Pullback(f, z_star), gaussian(z_star, generator), steps)
        return SpectralRadius(outer.values, outer.error, residual, tolerance)
    found: list[Ritz] = []
    for multiply, token in _diagonal_blocks(f, z_star):
        found.append(ritz_values(multiply, gaussian(token, generator), steps))
    values, errors = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    return SpectralRadius(values, errors, residual, tolerance)


def model_spectral_radius(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    sweep: Sweep = Simultaneous(),
    steps: int = 32,
    seed: int = 0,
    per: Part = "token",
    tolerance: float = 1e-2,
) -> SpectralRadius:
    """:func:`spectral_radius` of a model's map at the fixed point that it finds for some tokens, in eval mode.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        solver: instead of the model's own.
        stop: instead of the model's own.
        sweep: which tokens are solved together.
        steps: products with the Jacobian a row or token, at least 1.
        seed: of the random vectors to begin with.
        per: one radius a row, or one a token.
        tolerance: the relative residual up to which the point counts as a fixed point.

    Returns:
        A :class:`SpectralRadius`, on the CPU; not a number at padding.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary, or a number out of its range.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8, contraction=0.4)))
        >>> report = model_spectral_radius(lm, torch.arange(6).reshape(2, 3))
        >>> exact = torch.linalg.eigvals(lm.model.backbone.A.detach()).abs().max()
        >>> report.radius.shape, torch.allclose(report.per_row, exact.expand(2), atol=1e-4)
        (torch.Size([2, 3]), True)
    """
    who = "model_spectral_radius"
    with fixed_point_of(model, ids, asker=who, mask=mask, solver=solver, stop=stop, sweep=sweep) as point:
        found = spectral_radius(point.f, point.value, steps=steps, seed=seed, per=per, tolerance=tolerance)
    if per == "sample" or mask is None or point.padding.real is None:
        return found
    padded = ~point.padding.real.cpu()
    order = point.padding.order
    padding = replace(point.padding, order=None if order is None else order.cpu())
    values = padding.back(found.eigenvalues.masked_fill(padded[..., None], torch.nan))
    return replace(found, eigenvalues=values, error=padding.back(found.error.masked_fill(padded, torch.nan)))


def _diagonal_blocks(f: FixedPointMap, z_star: State) -> Iterator[tuple[Callable[[State], State], State]]:
    """For each token the products with its own block of the Jacobian, and its state ``(batch, dim)``."""
    if not isinstance(f, TokenMap):
        pullback = Pullback(f, z_star)
        for t in range(z_star.shape[1]):
            yield _block_of(pullback, t), z_star[:, t]
        return
    rest_of = f
    for t in range(z_star.shape[1]):
        one = rest_of.first(1, recording=True)
        yield _block_of(Pullback(one, z_star[:, t : t + 1]), 0), z_star[:, t]
        if t + 1 < z_star.shape[1]:
            cache, _ = one.settled(1)  # from the evaluation that the products were made of
            rest_of = rest_of.beyond(1, cache)


def _block_of(pullback: Pullback, t: int) -> Callable[[State], State]:
    """Products with the diagonal block of token ``t``: the other tokens are held."""

    def multiply(v: State) -> State:
        spread = torch.zeros_like(pullback.z)
        spread[:, t] = v
        return pullback(spread)[:, t]

    return multiply


def _largest_token(numbers: Tensor) -> Tensor:
    """The largest of each row, leaving out what is not a number at padding."""
    if numbers.ndim == 1:
        return numbers
    known = numbers.nan_to_num(nan=-torch.inf).amax(dim=1)
    return torch.where(known.isinf(), torch.nan, known)
