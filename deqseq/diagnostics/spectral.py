"""How far a map expands around its fixed point: the spectral radius of its Jacobian."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.check import check_callable, check_integer, check_number
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.arnoldi import Ritz, ritz_values
from deqseq.diagnostics.figures import GREY, Drawable, colour, finish, reference_line, row_label
from deqseq.diagnostics.solved_model import SolvedModel, check_call, seeded, solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.evaluate import check_start, evaluate
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.padding import Padding
from deqseq.rows import map_tensors
from deqseq.stop import Stop, relative
from deqseq.tokens import token_map
from deqseq.types import FixedPointMap, Mask, RowMask, State

if TYPE_CHECKING:
    import matplotlib.axes

TOLERANCE = 1e-2
"""The relative residual up to which a point counts as a fixed point."""


@dataclass(frozen=True)
class SpectralRadius(Drawable):
    """Outer eigenvalues of each row or token; prints as a table.

    Attributes:
        eigenvalues: approximations of the outer eigenvalues, ``(batch, count)`` or ``(batch, length, count)``; NaN at
            padding and where the Jacobian is not finite.
        backward_error: the largest of them is exact for a Jacobian that differs from the true one by so much, in norm,
            ``(batch,)`` or ``(batch, length)``; take more products if it is not small.
        residual: relative residual of the point, ``(batch,)``: the largest over the tokens.
    """

    eigenvalues: Complex[Tensor, "batch *tokens count"]
    backward_error: Float[Tensor, "batch *tokens"]
    residual: Float[Tensor, " batch"]

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
        """The rows whose residual is at most 0.01; at other points the radius says little about a solve."""
        return self.residual <= TOLERANCE

    def damped(self, damping: float) -> Float[Tensor, "batch *tokens"]:
        r"""The radius of the damped iteration, :math:`\max |1 - \tau + \tau \lambda|`.

        Args:
            damping: :math:`\tau` of :class:`~deqseq.Relaxed`, above 0.

        Returns:
            ``(batch,)`` or ``(batch, length)``.
        """
        check_number("damping", damping, "(0, inf)")
        return (1 - damping + damping * self.eigenvalues).abs().amax(dim=-1)

    def __str__(self) -> str:
        columns = {"spectral radius": texts(self.per_row, ".3f")}
        columns |= {"backward error": texts(_largest_token(self.backward_error), ".0e")}
        columns |= {"residual": texts(self.residual, ".1e"), "fixed point": yes_no(self.at_fixed_point)}
        return row_table(columns)

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the radius of each token, or the eigenvalues of each row, on ``axis``; dotted or hollow if unsolved."""
        solved = self.at_fixed_point.tolist()
        if self.backward_error.ndim == 2:
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


def spectral_radius(f: FixedPointMap, z_star: State, *, products: int = 32, seed: int = 0) -> SpectralRadius:
    r"""The largest absolute eigenvalue of a map's Jacobian at a point, per row, by Arnoldi's method.

    Below 1, plain iteration converges near the point, in the long run by this factor per iteration. For a model take
    :func:`model_spectral_radius`: over a whole sequence, what one token passes to the next can look like an eigenvalue
    until there are more products than tokens (``backward_error`` shows it).

    Args:
        f: the map.
        z_star: the point, ``(batch, *event)``.
        products: products with the Jacobian per row, at least 1; exact with as many as dimensions.
        seed: of the random vectors that the method starts from.

    Returns:
        A :class:`SpectralRadius`, on the CPU.

    Raises:
        TypeError: an argument of the wrong type, such as a ``z_star`` that is not a floating-point tensor.
        ValueError: ``z_star`` is empty or not finite, or ``products`` is below 1.

    References:
        Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.

    Example:
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])      # a complex pair: 0.9i and -0.9i
        >>> report = spectral_radius(lambda z: z @ turn, torch.zeros(1, 2))
        >>> report.radius, report.damped(0.5)
        (tensor([0.9000]), tensor([0.6727]))
    """
    check_callable("f", f)
    check_start("z_star", z_star)
    check_integer("products", products, 1)
    found, fz, _ = _eigenvalues(f, z_star, products, seeded(seed))
    return SpectralRadius(found.values, found.error, _residual(z_star, fz))


def model_spectral_radius(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    products: int = 32,
    seed: int = 0,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> SpectralRadius:
    r"""The spectral radius of each token of a model, at the fixed point that it finds in eval mode.

    The Jacobian of a causal map is block triangular over the tokens, so its eigenvalues are those of its diagonal
    blocks :math:`\partial f_t / \partial z_t`. They are found block by block, with the tokens before in the cache.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        products: products with the Jacobian per token, at least 1; exact with as many as the state is wide.
        seed: of the random vectors that the method starts from.
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`SpectralRadius`, on the CPU; NaN at padding.

    Raises:
        TypeError: an explicit model, or an argument of the wrong type.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or ``products`` is below 1.
        NotImplementedError: a backbone without ``advance``; :func:`spectral_radius` takes any map.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8, contraction=0.4)))
        >>> report = model_spectral_radius(lm, torch.arange(6).reshape(2, 3))
        >>> exact = torch.linalg.eigvals(lm.model.backbone.A.detach()).abs().max()
        >>> report.radius.shape, torch.allclose(report.per_row, exact.expand(2), atol=1e-4)
        (torch.Size([2, 3]), True)
    """
    mask, config = check_call(model, ids, mask, solve, fields)
    check_integer("products", products, 1)
    generator = seeded(seed)
    with solved_model(model, ids, mask, config) as solved:
        return radius_of(solved, products, generator)


def radius_of(solved: SolvedModel, products: int, generator: torch.Generator) -> SpectralRadius:
    """The eigenvalues of a map of each token alone, against the cache of those before it."""
    args, z, cache, found = solved.args, solved.value, None, []
    for t in range(z.shape[1]):
        one = map_tensors(lambda x, t=t: x[:, t : t + 1], args)._replace(cache=cache, need_aux=True)
        block, _, aux = _eigenvalues(token_map, z[:, t : t + 1], products, generator, one, has_aux=True)
        found.append(block)
        if t + 1 < z.shape[1]:
            cache = one.advance(aux, 1, None if one.mask is None else one.mask.sum(dim=1))
    values, error = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    mask = solved.mask.cpu()
    padding = Padding.of(error, mask)
    values = padding.back(values).masked_fill(~mask[..., None], torch.nan)
    error = padding.back(error).masked_fill(~mask, torch.nan)
    return SpectralRadius(values, error, _residual(z, solved.f(z)))


def _eigenvalues(
    f: FixedPointMap,
    z: State,
    products: int,
    generator: torch.Generator,
    args: Any = None,
    *,
    has_aux: bool = False,
) -> tuple[Ritz, State, Any]:
    r"""Outer eigenvalues of the Jacobian :math:`J` at a point, row by row; the value of the map and its ``aux``.

    They are those of :math:`J^\top`: reverse mode works for every map that can be trained. The map is evaluated once.
    """
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        fz, aux = evaluate(f, z, args, has_aux=has_aux)

    def pullback(v: State) -> State:
        if not fz.requires_grad:
            return torch.zeros_like(v)
        (pulled,) = torch.autograd.grad(fz, z, v, retain_graph=True, materialize_grads=True)
        return pulled

    return ritz_values(pullback, torch.randn(z.shape, generator=generator).to(z), products), fz, aux


def _residual(z: State, fz: State) -> Float[Tensor, " batch"]:
    """The largest relative residual of each row's tokens."""
    return relative(*Stop().distances(z, fz, 1)).amax(dim=1).cpu()


def _largest_token(numbers: Tensor) -> Tensor:
    """The largest of each row, without padding."""
    if numbers.ndim == 1:
        return numbers
    known = numbers.nan_to_num(nan=-torch.inf).amax(dim=1)
    return torch.where(known.isinf(), torch.nan, known)
