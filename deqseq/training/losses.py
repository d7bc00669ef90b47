"""Terms of a training loss: the size of a map's Jacobian, and how far a state is from a fixed point."""

from contextlib import nullcontext
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq.annotations import AtLeast, checked
from deqseq.evaluate import check_start, evaluate
from deqseq.stop import token_norms
from deqseq.types import FixedPointMap, State


@checked
def jacobian_regularisation(
    f: FixedPointMap,
    z_star: State,
    *,
    samples: Annotated[int, AtLeast(1)] = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    r"""The size of the Jacobian at a fixed point, as a term of a training loss that keeps solves short.

    .. math:: \frac{1}{n} \lVert J \rVert_F^2 = \frac{1}{n}\, \mathbb{E}_{v \sim \mathcal{N}(0, I)}
              \lVert J^\top v \rVert^2, \qquad J = \frac{\partial f}{\partial z}(z^*),

    where :math:`n` is the number of elements of a row's state; the mean over the rows is returned. A few draws estimate
    it without bias (Hutchinson), and it bounds the squared spectral radius. The gradient reaches whatever ``f`` closes
    over, by a second derivative of ``f``; the point itself gets none, as in the paper. Fused kernels of Mamba2 have no
    second derivative: train with ``Mamba2Config(backend="reference")``.

    Args:
        f: the map.
        z_star: its fixed point, ``(batch, *event)``; its history is cut.
        samples: draws of :math:`v`, at least 1; each costs one backward pass through ``f``.
        generator: of the draws. Default: torch's global generator.

    Raises:
        TypeError, ValueError: ``z_star`` is not a floating-point tensor, or it is empty or not finite.

    References:
        Bai, Koltun and Kolter, Stabilizing Equilibrium Models by Jacobian Regularization, ICML 2021, arXiv
        2106.14342, equation 5.

    Example:
        >>> W = torch.diag(torch.tensor([0.5, 0.1]))
        >>> generator = torch.Generator().manual_seed(0)
        >>> f, z_star = lambda z: z @ W, torch.zeros(1, 2)
        >>> value = jacobian_regularisation(f, z_star, samples=4000, generator=generator)
        >>> round(value.item(), 2)      # (0.25 + 0.01) / 2
        0.13
    """
    check_start("z_star", z_star)
    differentiable = torch.is_grad_enabled()
    device = z_star.device if generator is None else generator.device
    # only the plain form of attention has a second derivative
    attention = sdpa_kernel(SDPBackend.MATH) if differentiable else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), attention:
        z = z_star.detach().clone().requires_grad_()
        fz, _ = evaluate(f, z)
        if not fz.requires_grad:
            fz = fz + 0 * z  # a map that ignores its state, and has no parameters
        sizes = []
        for _ in range(samples):
            v = torch.randn(z.shape, generator=generator, device=device).to(z)
            (pulled,) = torch.autograd.grad(
                fz, z, v, retain_graph=True, create_graph=differentiable, materialize_grads=True
            )
            sizes.append(pulled.to(torch.promote_types(z.dtype, torch.float32)).square().mean())
        value = torch.stack(sizes).mean()
    return value if differentiable else value.detach()


@checked
def terminal_residual(
    f: FixedPointMap, z: State, *, mask: Bool[Tensor, "batch tokens"] | None = None
) -> Float[Tensor, ""]:
    r"""The relative residual of a state, as a term of a training loss that makes iterations end at a fixed point.

    .. math:: \frac{1}{|T|} \sum_{t \in T} \frac{\lVert f(z)_t - z_t \rVert}{\lVert f(z)_t \rVert}

    with norms over the last dimension and :math:`T` the real tokens of all rows. The gradient reaches whatever ``f``
    closes over, and what the state was computed from; ``z.detach()`` leaves the latter out.

    Args:
        f: the map.
        z: the state in which the iteration ended, ``(batch, *event)``, such as a model's ``value``.
        mask: bool, True at real tokens, ``(batch, tokens)``. Default: no padding.

    Raises:
        ValueError: ``z`` is empty or not finite, or ``mask`` has another shape or dtype or no real token.

    Example:
        >>> z = torch.tensor([[[1.0], [2.0], [5.0]]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> terminal_residual(lambda z: 0.5 * z + 1, z, mask=mask)     # |1.5 - 1| / 1.5, and 2 is the fixed point
        tensor(0.1667)
    """
    check_start("z", z)
    fz, _ = evaluate(f, z)
    distance, scale = token_norms(fz - z), token_norms(fz)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != scale.shape or not bool(mask.any()):
            got = f"{mask.dtype} {tuple(mask.shape)} with {int(mask.sum())} of them"
            raise ValueError(f"mask must be bool {tuple(scale.shape)}, True at real tokens, got {got}")
        distance, scale = distance[mask], scale[mask]
    return (distance / scale.clamp_min(torch.finfo(scale.dtype).tiny)).mean()
