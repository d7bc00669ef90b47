"""How far a map expands around its fixed point: the spectral radius of its Jacobian."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Unpack

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.arguments import Function, PositiveInt, Within, checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.reports import check_call, text_table
from deqseq.layers import with_weights
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.padding import Padding
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.rows import map_tensors
from deqseq.step import check_start, evaluate
from deqseq.stop import Stop, relative
from deqseq.types import FixedPointMap, Mask, RowMask, State, float32_at_least

TOLERANCE = 1e-2
"""The relative residual up to which a point counts as a fixed point."""
SHOWN = 8
"""How many rows of a batch a report prints."""


@dataclass(frozen=True)
class SpectralRadius:
    """The eigenvalues of largest absolute value of the Jacobian of each row or token, on the CPU;
    prints as a table.

    Attributes:
        eigenvalues: approximations, ``(batch, count)`` or ``(batch, length, count)``; ``count`` is
            ``products``, but at most the state's dimensions. NaN at padding and where the Jacobian
            is not finite.
        backward_error: norm of the smallest change of the Jacobian that would make the largest one
            exact, ``(batch,)`` or ``(batch, length)``; use more products if it is not small.
        residual: relative residual of the point, ``(batch,)``: the largest over the tokens.
    """

    eigenvalues: Complex[Tensor, "batch *tokens count"]
    backward_error: Float[Tensor, "batch *tokens"]
    residual: Float[Tensor, " batch"]

    @property
    def radius(self) -> Float[Tensor, "batch *tokens"]:
        """The largest absolute eigenvalue of each row or token.

        If it is below 1, plain iteration converges near the point.
        """
        return self.eigenvalues.abs().amax(dim=-1)

    @property
    def per_row(self) -> Float[Tensor, " batch"]:
        """The largest radius of each row, which for a causal map is that of the sequence."""
        return _largest_token(self.radius)

    @property
    def at_fixed_point(self) -> RowMask:
        """The rows whose residual is at most 0.01; elsewhere the radius says little."""
        return self.residual <= TOLERANCE

    @checked
    def damped(
        self, damping: Annotated[float | int, Within("(0, inf)")]
    ) -> Float[Tensor, "batch *tokens"]:
        r"""The radius of the damped iteration, :math:`\max |1 - \tau + \tau \lambda|`.

        Args:
            damping: :math:`\tau` of :class:`~deqseq.Relaxed`, above 0.
        """
        return (1 - damping + damping * self.eigenvalues).abs().amax(dim=-1)

    def __str__(self) -> str:
        header = ("row", "spectral radius", "backward error", "residual", "fixed point")
        radius = self.per_row
        error = _largest_token(self.backward_error)
        rows = len(radius)
        lines = []
        for row in range(min(rows, SHOWN)):
            at_fixed_point = "yes" if self.at_fixed_point[row] else "no"
            numbers = (f"{radius[row]:.3f}", f"{error[row]:.0e}", f"{self.residual[row]:.1e}")
            lines.append((str(row), *numbers, at_fixed_point))
        more = f"\n... and {rows - SHOWN} more rows" if rows > SHOWN else ""
        return text_table(header, lines) + more


@checked
def spectral_radius(
    f: FixedPointMap, z_star: State, *, products: PositiveInt = 32
) -> SpectralRadius:
    r"""The largest absolute eigenvalue of a map's Jacobian at a point, per row, by Arnoldi's
    method.

    If it is below 1, plain iteration converges near the point, in the long run by this factor per
    iteration. For a model use :func:`model_spectral_radius`: over a whole sequence, the influence
    of one token on the next can look like an eigenvalue until there are more products than tokens
    (``backward_error`` shows this).

    Args:
        f: the map, ``z -> f(z)``, of one argument.
        z_star: the point, usually a fixed point, ``(batch, *event)``.
        products: products with the Jacobian per row, at least 1; the result is exact with as many
            as the state has dimensions.

    Raises:
        TypeError, ValueError: ``z_star`` is not a floating-point tensor, or it is empty or not
            finite; or ``f`` cuts the graph between ``z`` and its value.

    References:
        Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.

    Example:
        >>> import torch
        >>> from deqseq.diagnostics import spectral_radius
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])  # a complex pair: 0.9i and -0.9i
        >>> report = spectral_radius(lambda z: z @ turn, torch.zeros(1, 2))
        >>> report.radius, report.damped(0.5)
        (tensor([0.9000]), tensor([0.6727]))
    """
    Function(1)("f", f)
    check_start("z_star", z_star)
    generator = torch.Generator().manual_seed(0)
    values, error, fz, _ = _eigenvalues(lambda z: (f(z), None), z_star, products, generator)
    return SpectralRadius(values, error, _residual(z_star, fz))


@checked
def model_spectral_radius(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    products: PositiveInt = 32,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> SpectralRadius:
    r"""The spectral radius of each token of a model, at the fixed point that it finds in eval mode.

    The Jacobian of a causal map is block triangular over the tokens, so its eigenvalues are those
    of its diagonal blocks :math:`\partial f_t / \partial z_t`. Each block is evaluated with the
    earlier tokens in the cache.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        products: products with the Jacobian per token, at least 1; the result is exact with as many
            as the width of the state.
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, or another
            argument that does not fit.
        NotImplementedError: a backbone without ``advance``; :func:`spectral_radius` takes any map.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq.diagnostics import model_spectral_radius
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8, contraction=0.4)))
        >>> report = model_spectral_radius(lm, torch.arange(6).reshape(2, 3))
        >>> report.radius.shape, bool(report.per_row.max() <= 0.4)
        (torch.Size([2, 3]), True)
    """
    core, real, config = check_call(model, ids, mask, solve, fields)
    generator = torch.Generator().manual_seed(0)
    cache = None
    blocks = []
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        # tensors made in inference mode would forbid any graph
        real = real.clone()
        x = model.embed(ids.clone())
        if isinstance(model.model, RecurrentDepth):
            x = model.model.prelude(x, mask=real).value
        padding = Padding.of(x, real)
        z = padding.compact(core(x, mask=real, solve=config).value)
        backbone = with_weights(core.backbone)
        inputs = backbone.prepare(padding.compact(x), None, padding.mask)
        for t in range(z.shape[1]):
            # each token's map by itself, against the cache of the tokens before it
            token = map_tensors(lambda x, t=t: x[:, t : t + 1], inputs)
            f = partial(backbone, inputs=token, cache=cache, need_aux=True)
            *block, aux = _eigenvalues(f, z[:, t : t + 1], products, generator)
            blocks.append(block)
            if t + 1 < z.shape[1]:
                counts = None if padding.mask is None else padding.mask[:, t].long()
                cache = backbone.advance(cache, aux, 1, counts)
        values, error, fz = (torch.stack(tokens, dim=1) for tokens in zip(*blocks, strict=True))
        fz = fz.flatten(1, 2)
        if padding.mask is not None:
            fz = fz.masked_fill(~padding.mask[..., None], 0)
        residual = _residual(z, fz)
    real = real.cpu()
    padding = Padding.of(error, real)
    values = padding.back(values).masked_fill(~real[..., None], torch.nan)
    return SpectralRadius(values, padding.back(error).masked_fill(~real, torch.nan), residual)


def _eigenvalues(
    f: FixedPointMap, z: State, products: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, State, Any]:
    r"""Outer eigenvalues of the Jacobian at a point and their error; the value of the map, ``aux``.

    They are those of the transposed Jacobian, because reverse mode works for every map that can be
    trained. The map is evaluated once.
    """
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        fz, aux = evaluate(f, z, has_aux=True)

    def pullback(v: State) -> State:
        if not fz.requires_grad:
            return torch.zeros_like(v)
        (pulled,) = torch.autograd.grad(fz, z, v, retain_graph=True, materialize_grads=True)
        return pulled

    start = torch.randn(z.shape, generator=generator, device="cpu").to(z)
    if not pullback(start).any():
        with torch.no_grad():
            elsewhere = evaluate(f, z + 0.01 * z.abs().mean() + 0.01, has_aux=True)[0]
        if not torch.equal(elsewhere, fz):
            raise ValueError(
                "f must keep the graph from z to f(z), which has none, although f(z) changes with "
                "z: a detach() or no_grad() inside of f?"
            )
    return *_ritz_values(pullback, start, products), fz.detach(), aux


def _ritz_values(
    multiply: Callable[[State], State], start: State, products: int
) -> tuple[Complex[Tensor, "batch products"], Float[Tensor, " batch"]]:
    r"""Arnoldi's method: each row's eigenvalues in the space of :math:`v, Av, A^2 v, \ldots`.

    Unlike the power method it finds complex pairs and several eigenvalues of one size, and it is
    exact with as many products as dimensions. Rows whose Krylov space closes early have zeros at
    the end; rows with non-finite products are NaN.

    Returns:
        The eigenvalues, and the norm of the smallest change of the matrix that makes the largest
        one exact.
    """
    first = start.flatten(1).to(float32_at_least(start))
    batch, size = first.shape
    products = min(products, size)
    basis = first.new_zeros(batch, products + 1, size)
    hessenberg = first.new_zeros(batch, products + 1, products)
    basis[:, 0] = first / first.norm(dim=1, keepdim=True)
    for k in range(products):
        product = multiply(basis[:, k].to(start.dtype).reshape(start.shape))
        w = product.reshape(batch, size).to(first.dtype)
        negligible = 10 * torch.finfo(start.dtype).eps * w.norm(dim=1)
        for _ in range(2):  # the second time removes what rounding left
            along = torch.einsum("bkn,bn->bk", basis, w)
            w = w - torch.einsum("bkn,bk->bn", basis, along)
            hessenberg[:, :, k] += along
        length = w.norm(dim=1)
        closed = length <= negligible  # zeros from here on
        hessenberg[:, k + 1, k] = length.masked_fill(closed, 0)
        basis[:, k + 1] = w / length.masked_fill(closed, torch.inf)[:, None]
    hessenberg = hessenberg.cpu()
    broken = ~hessenberg.isfinite().flatten(1).all(dim=1)
    hessenberg[broken] = 0
    values, vectors = torch.linalg.eig(hessenberg[:, :-1])
    largest = values.abs().argmax(dim=1, keepdim=True)
    error = hessenberg[:, -1, -1] * vectors[:, -1].gather(1, largest)[:, 0].abs()
    values[broken] = torch.nan
    error[broken] = torch.nan
    return values, error


def _residual(z: State, fz: State) -> Float[Tensor, " batch"]:
    """The largest relative residual of each row's tokens."""
    return relative(Stop().measure(z, fz, 1)[0]).amax(dim=1).cpu()


def _largest_token(numbers: Tensor) -> Tensor:
    """The largest of each row, without padding."""
    if numbers.ndim == 1:
        return numbers
    largest = numbers.nan_to_num(nan=-torch.inf).amax(dim=1)
    return largest.masked_fill(largest.isinf(), torch.nan)
