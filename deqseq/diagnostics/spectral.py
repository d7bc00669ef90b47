"""How far a map expands around its fixed point: the spectral radius of its Jacobian."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Unpack, get_args

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.backbones.base import Backbone
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.arnoldi import ritz_values
from deqseq.diagnostics.figures import GREY, Drawable, colour, finish, reference_line, row_label
from deqseq.diagnostics.jacobian import Pullback, check_count, check_point, gaussian
from deqseq.diagnostics.solved_model import SolvedModel, solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.norms import measure
from deqseq.stop import Stop
from deqseq.sweeps.run import advance, token_map
from deqseq.types import FixedPointMap, Mask, RowMask, State

if TYPE_CHECKING:
    import matplotlib.axes

Per = Literal["sample", "token"]
Block = tuple[Callable[[State], State], State]
"""Products with a diagonal block of a Jacobian, and a state of the block's size."""


@dataclass(frozen=True)
class SpectralRadius(Drawable):
    """Outer eigenvalues of each row or token; prints as a table.

    Attributes:
        eigenvalues: approximations of the outer eigenvalues, ``(batch, count)`` or ``(batch, length, count)``; NaN at
            padding and where the Jacobian is not finite.
        error: how far the Jacobian would have to change, in norm, for the largest of them to be exact, ``(batch,)`` or
            ``(batch, length)``; take more products if it is large.
        residual: relative residual of the point, ``(batch,)``: the largest over the tokens.
        tolerance: above this residual the point is no fixed point, and the radius says little about the solve.
    """

    eigenvalues: Complex[Tensor, "batch *tokens count"]
    error: Float[Tensor, "batch *tokens"]
    residual: Float[Tensor, " batch"]
    tolerance: float

    @property
    def radius(self) -> Float[Tensor, "batch *tokens"]:
        """The largest absolute eigenvalue of each row or token: below 1, plain iteration converges near the point."""
        return self.eigenvalues.abs().amax(dim=-1)

    @property
    def per_row(self) -> Float[Tensor, " batch"]:
        """The largest radius of each row: for a causal map that of the whole sequence."""
        return _largest_token(self.radius)

    @property
    def at_fixed_point(self) -> RowMask:
        """The rows whose point is a fixed point, up to ``tolerance``."""
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
        columns = {"spectral radius": texts(self.per_row, ".3f"), "error": texts(_largest_token(self.error), ".0e")}
        columns |= {"residual": texts(self.residual, ".1e"), "fixed point": yes_no(self.at_fixed_point)}
        return row_table(columns)

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the radius of each token, or the eigenvalues of each row, on ``axis``; dotted or hollow if unsolved."""
        solved = self.at_fixed_point.tolist()
        if self.error.ndim == 2:
            for row, radius in enumerate(self.radius.tolist()):
                style = {"color": colour(row), "linestyle": "-" if solved[row] else ":", "linewidth": 1}
                axis.plot(radius, marker=".", label=row_label(row, len(solved)), **style)
            reference_line(axis, 1.0, "expands above")
            axis.set_ylim(bottom=0)
            finish(axis, "token", "spectral radius", legend=True)
            return
        angles = torch.linspace(0, 2 * torch.pi, 200)
        axis.plot(angles.cos().tolist(), angles.sin().tolist(), "--", color=GREY, linewidth=1)
        for row, values in enumerate(self.eigenvalues):
            fill = colour(row) if solved[row] else "none"
            axis.scatter(values.real.tolist(), values.imag.tolist(), s=14, facecolors=fill, edgecolors=colour(row))
        axis.set_aspect("equal", adjustable="datalim")
        finish(axis, "eigenvalues, real part", "imaginary part")


def spectral_radius(
    f: FixedPointMap,
    z_star: State,
    *,
    products: int = 32,
    seed: int = 0,
    per: Per = "sample",
    tolerance: float = 1e-2,
) -> SpectralRadius:
    r"""The largest absolute eigenvalue of a map's Jacobian at a point, by Arnoldi's method.

    Below 1, plain iteration converges near the point, in the long run by this factor per iteration. The Jacobian of a
    causal map is block triangular over the tokens, so its eigenvalues are those of its diagonal blocks
    :math:`\partial f_t / \partial z_t`. With ``per="token"`` they are found block by block, which is exact with as many
    products as the state is wide. With ``per="sample"`` the method sees the whole sequence: what one token passes to
    the next can look like an eigenvalue until there are more products than tokens (``error`` shows it).

    Args:
        f: the map. With ``per="token"`` it must be causal.
        z_star: the point, ``(batch, *event)``; with ``per="token"`` ``(batch, length, dim)``.
        products: products with the Jacobian per row or token, at least 1; exact with as many as dimensions.
        seed: of the random vectors that the method starts from.
        per: one radius per row (``"sample"``), or one per ``"token"``.
        tolerance: the relative residual up to which the point counts as a fixed point.

    Returns:
        A :class:`SpectralRadius`, on the CPU.

    Raises:
        TypeError: ``z_star`` is not a floating-point tensor.
        ValueError: ``z_star`` is empty, not finite or, with ``per="token"``, without tokens; ``products`` is below 1;
            or ``per`` is unknown.

    References:
        Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.

    Example:
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])      # a complex pair: 0.9i and -0.9i
        >>> report = spectral_radius(lambda z: z @ turn, torch.zeros(1, 2))
        >>> report.radius, report.damped(0.5)
        (tensor([0.9000]), tensor([0.6727]))
    """
    check_point(z_star)
    _check(products, per)
    if per == "token" and z_star.ndim != 3:
        raise ValueError(f'per="token" needs z_star of shape (batch, length, dim), got {tuple(z_star.shape)}')
    whole = Pullback(f, z_star)
    if per == "token":
        return _radius(whole, (_block_of(whole, t) for t in range(z_star.shape[1])), products, seed, tolerance)
    found = _radius(whole, iter([(whole, whole.z)]), products, seed, tolerance)
    return replace(found, eigenvalues=found.eigenvalues[:, 0], error=found.error[:, 0])


def model_spectral_radius(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    products: int = 32,
    seed: int = 0,
    per: Per = "token",
    tolerance: float = 1e-2,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> SpectralRadius:
    """:func:`spectral_radius` of a model's map at the fixed point that it finds for some tokens, in eval mode.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        products: products with the Jacobian per row or token, at least 1.
        seed: of the random vectors that the method starts from.
        per: one radius per row (``"sample"``), or one per ``"token"``.
        tolerance: the relative residual up to which the point counts as a fixed point.
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`SpectralRadius`, on the CPU; NaN at padding.

    Raises:
        TypeError: an explicit model.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, ``products`` is below 1, or ``per`` is unknown.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8, contraction=0.4)))
        >>> report = model_spectral_radius(lm, torch.arange(6).reshape(2, 3))
        >>> exact = torch.linalg.eigvals(lm.model.backbone.A.detach()).abs().max()
        >>> report.radius.shape, torch.allclose(report.per_row, exact.expand(2), atol=1e-4)
        (torch.Size([2, 3]), True)
    """
    _check(products, per)
    with solved_model(model, ids, "model_spectral_radius", mask=mask, solve=solve, fields=fields) as solved:
        # a backbone without a cache is differentiated over the whole sequence for each token
        if per == "sample" or type(solved.backbone).advance is Backbone.advance:
            found = spectral_radius(solved.f, solved.value, products=products, seed=seed, per=per, tolerance=tolerance)
        else:
            found = _radius(Pullback(solved.f, solved.value), _blocks(solved), products, seed, tolerance)
    if per == "sample" or mask is None or solved.padding.mask is None:
        return found
    mask, moved = mask.cpu(), solved.padding.mask.cpu()
    parts = {"eigenvalues": found.eigenvalues, "error": found.error}
    for name, values in parts.items():
        parts[name] = torch.full_like(values, torch.nan)
        parts[name][mask] = values[moved]  # both have the real tokens of a row in their order
    return replace(found, **parts)


def _check(products: int, per: Per) -> None:
    check_count("products", products)
    if per not in get_args(Per):
        raise ValueError(f"per must be one of {get_args(Per)}, got {per!r}")


def _radius(whole: Pullback, blocks: Iterator[Block], products: int, seed: int, tolerance: float) -> SpectralRadius:
    """The eigenvalues of each block, and the residual of the whole point."""
    residual = measure(whole.z, whole.fz, Stop()).residual.cpu()
    generator = torch.Generator().manual_seed(seed)
    found = [ritz_values(multiply, gaussian(z, generator), products) for multiply, z in blocks]
    values, errors = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    return SpectralRadius(values, errors, residual, tolerance)


def _blocks(solved: SolvedModel) -> Iterator[Block]:
    """For each token the block of a map of that token alone, against the cache of those before it."""
    args, z = solved.args, solved.value
    for t in range(z.shape[1]):
        one = args.slice(t, t + 1, z.shape[1])
        pullback = Pullback(token_map(solved.backbone, need_aux=True), z[:, t : t + 1], one, has_aux=True)
        yield _block_of(pullback, 0)
        args = args._replace(cache=advance(solved.backbone, one, pullback.aux, 1))


def _block_of(pullback: Pullback, t: int) -> Block:
    """The diagonal block of token ``t``."""

    def multiply(v: State) -> State:
        padded = torch.zeros_like(pullback.z)
        padded[:, t] = v
        return pullback(padded)[:, t]

    return multiply, pullback.z[:, t]


def _largest_token(numbers: Tensor) -> Tensor:
    """The largest of each row, without padding."""
    if numbers.ndim == 1:
        return numbers
    known = numbers.nan_to_num(nan=-torch.inf).amax(dim=1)
    return torch.where(known.isinf(), torch.nan, known)
