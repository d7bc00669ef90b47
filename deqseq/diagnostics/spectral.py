"""How far a map expands around its fixed point: the spectral radius of its Jacobian."""

from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.arguments import AtLeast, Within, checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.arnoldi import ritz_values
from deqseq.diagnostics.reports import SHOWN, check_call, remaining, text_table
from deqseq.layers import with_weights
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.padding import Padding
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.rows import map_tensors
from deqseq.step import check_start, evaluate
from deqseq.stop import Stop, relative
from deqseq.tokens import TokenArgs, token_map
from deqseq.types import FixedPointMap, Mask, RowMask, State

Products = Annotated[int, AtLeast(1)]
TOLERANCE = 1e-2
"""The relative residual up to which a point counts as a fixed point."""


@dataclass(frozen=True)
class SpectralRadius:
    """Outer eigenvalues of each row or token, on the CPU; prints as a table.

    Attributes:
        eigenvalues: approximations of the outer eigenvalues, ``(batch, count)`` or ``(batch,
            length, count)``; NaN at padding and where the Jacobian is not finite.
        backward_error: the largest is exact for a Jacobian that differs by so much, in norm,
            ``(batch,)`` or ``(batch, length)``; take more products if it is not small.
        residual: relative residual of the point, ``(batch,)``: the largest over the tokens.
    """

    eigenvalues: Complex[Tensor, "batch *tokens count"]
    backward_error: Float[Tensor, "batch *tokens"]
    residual: Float[Tensor, " batch"]

    @property
    def radius(self) -> Float[Tensor, "batch *tokens"]:
        """The largest absolute eigenvalue of each row or token: below 1, plain iteration converges
        near the point.
        """
        return self.eigenvalues.abs().amax(dim=-1)

    @property
    def per_row(self) -> Float[Tensor, " batch"]:
        """The largest radius of each row: for a causal map that of the whole sequence."""
        return _largest_token(self.radius)

    @property
    def at_fixed_point(self) -> RowMask:
        """The rows whose residual is at most 0.01; at other points the radius says little about a
        solve.
        """
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
        columns = (
            self.per_row,
            _largest_token(self.backward_error),
            self.residual,
            self.at_fixed_point,
        )
        rows = enumerate(zip(*(column.tolist() for column in columns), strict=True))
        lines = [
            (f"{i}", f"{r:.3f}", f"{e:.0e}", f"{s:.1e}", "yes" if ok else "no")
            for i, (r, e, s, ok) in rows
        ]
        header = ("row", "spectral radius", "backward error", "residual", "fixed point")
        return text_table(header, lines[:SHOWN]) + remaining(len(lines))


@checked
def spectral_radius(f: FixedPointMap, z_star: State, *, products: Products = 32) -> SpectralRadius:
    r"""The largest absolute eigenvalue of a map's Jacobian at a point, per row, by Arnoldi's
    method.

    Below 1, plain iteration converges near the point, in the long run by this factor per iteration.
    For a model take :func:`model_spectral_radius`: over a whole sequence, what one token passes to
    the next can look like an eigenvalue until there are more products than tokens
    (``backward_error`` shows it).

    Args:
        f: the map.
        z_star: the point, ``(batch, *event)``.
        products: products with the Jacobian per row, at least 1; exact with as many as dimensions.

    Raises:
        TypeError, ValueError: ``z_star`` is not a floating-point tensor, or it is empty or not
            finite.

    References:
        Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.

    Example:
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])  # a complex pair: 0.9i and -0.9i
        >>> report = spectral_radius(lambda z: z @ turn, torch.zeros(1, 2))
        >>> report.radius, report.damped(0.5)
        (tensor([0.9000]), tensor([0.6727]))
    """
    check_start("z_star", z_star)
    found, fz, _ = _eigenvalues(f, z_star, products, torch.Generator().manual_seed(0))
    return SpectralRadius(*found, _residual(z_star, fz))


@checked
def model_spectral_radius(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    products: Products = 32,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> SpectralRadius:
    r"""The spectral radius of each token of a model, at the fixed point that it finds in eval mode.

    The Jacobian of a causal map is block triangular over the tokens, so its eigenvalues are those
    of its diagonal blocks :math:`\partial f_t / \partial z_t`, which are found with the tokens
    before in the cache.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        products: products with the Jacobian per token, at least 1; exact with as many as the state
            is wide.
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, or another
            argument that does not fit.
        NotImplementedError: a backbone without ``advance``; :func:`spectral_radius` takes any map.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8, contraction=0.4)))
        >>> report = model_spectral_radius(lm, torch.arange(6).reshape(2, 3))
        >>> report.radius.shape, bool(report.per_row.max() <= 0.4)
        (torch.Size([2, 3]), True)
    """
    core, real, config = check_call(model, ids, mask, solve, fields)
    generator, cache, found = torch.Generator().manual_seed(0), None, []
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        real, x = (
            real.clone(),
            model.embed(ids.clone()),
        )  # tensors made in inference mode would forbid any graph
        if isinstance(model.model, RecurrentDepth):
            x = model.model.prelude(x, mask=real).value
        padding = Padding.of(x, real)
        z = padding.compact(core(x, mask=real, solve=config).value)
        args = TokenArgs.prepared(
            with_weights(core.backbone), padding.compact(x), None, padding.mask, need_aux=False
        )
        for t in range(z.shape[1]):  # each token's map alone, against the cache of those before it
            one = map_tensors(lambda x, t=t: x[:, t : t + 1], args)._replace(
                cache=cache, need_aux=True
            )
            block, _, aux = _eigenvalues(
                token_map, z[:, t : t + 1], products, generator, one, has_aux=True
            )
            found.append(block)
            if t + 1 < z.shape[1]:
                cache = one.advance(
                    aux, len(z), 1, None if one.mask is None else one.mask.sum(dim=1)
                )
        residual = _residual(z, evaluate(token_map, z, args, has_aux=True)[0])
    values, error = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    real = real.cpu()
    padding = Padding.of(error, real)
    values = padding.back(values).masked_fill(~real[..., None], torch.nan)
    return SpectralRadius(values, padding.back(error).masked_fill(~real, torch.nan), residual)


def _eigenvalues(
    f: FixedPointMap,
    z: State,
    products: int,
    generator: torch.Generator,
    args: Any = None,
    *,
    has_aux: bool = False,
) -> tuple[tuple[Tensor, Tensor], State, Any]:
    r"""Outer eigenvalues of the Jacobian :math:`J` at a point, row by row; the value of the map and
    its ``aux``.

    They are those of :math:`J^\top`: reverse mode works for every map that can be trained. The map
    is evaluated once.
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
    return relative(Stop().distances(z, fz, 1)).amax(dim=1).cpu()


def _largest_token(numbers: Tensor) -> Tensor:
    """The largest of each row, without padding."""
    if numbers.ndim == 1:
        return numbers
    known = numbers.nan_to_num(nan=-torch.inf).amax(dim=1)
    return torch.where(known.isinf(), torch.nan, known)
