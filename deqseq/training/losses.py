"""A term of a training loss: the size of a map's Jacobian."""

from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq.arguments import Function, PositiveInt, checked
from deqseq.step import check_start, evaluate
from deqseq.types import FixedPointMap, State, float32_at_least


@checked
def jacobian_regularisation(
    f: FixedPointMap,
    z_star: State,
    *,
    samples: PositiveInt = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    r"""The size of the Jacobian at a fixed point; added to the loss, it keeps solves short.

    .. math:: \frac{1}{n} \lVert J \rVert_F^2 = \frac{1}{n}\, \mathbb{E}_{v \sim \mathcal{N}(0, I)}
              \lVert J^\top v \rVert^2, \qquad J = \frac{\partial f}{\partial z}(z^*),

    where :math:`n` is the number of elements of a row's state; the mean over the rows is returned.
    A few draws estimate it without bias (Hutchinson), and it bounds the squared spectral radius.
    Tensors that ``f`` closes over get a gradient, by a second derivative of ``f``; the point itself
    gets none, as in the paper. Fused kernels of Mamba2 have no second derivative: train with
    ``Mamba2Config(backend="reference")``.

    Args:
        f: the map.
        z_star: its fixed point, ``(batch, *event)``; it is detached.
        samples: draws of :math:`v`, at least 1; each costs one backward pass through ``f``.
        generator: generator of the draws. Default: torch's global generator.

    Raises:
        TypeError, ValueError: ``z_star`` is not a floating-point tensor, or it is empty or not
            finite.

    References:
        Bai, Koltun and Kolter, Stabilizing Equilibrium Models by Jacobian Regularization, ICML
        2021, arXiv 2106.14342, equation 5.

    Example:
        >>> W = torch.diag(torch.tensor([0.5, 0.1]))
        >>> generator = torch.Generator().manual_seed(0)
        >>> f, z_star = lambda z: z @ W, torch.zeros(1, 2)
        >>> value = jacobian_regularisation(f, z_star, samples=4000, generator=generator)
        >>> round(value.item(), 2)  # (0.25 + 0.01) / 2
        0.13
    """
    Function(1)("f", f)
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
            sizes.append(pulled.to(float32_at_least(z)).square().mean())
        value = torch.stack(sizes).mean()
    return value if differentiable else value.detach()
