"""The Jacobian of a map at its fixed point: products with it, and its size as a loss."""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq.evaluate import check_start, evaluate
from deqseq.types import FixedPointMap, State


class Pullback:
    r"""Products :math:`J^\top v` with the Jacobian :math:`J = \partial f / \partial z` at a point, row by row.

    The map is evaluated once. Reverse mode works for every map that can be trained, and :math:`J^\top` has the
    eigenvalues and the Frobenius norm of :math:`J`. With ``differentiable``, products carry a graph to the parameters.
    """

    def __init__(
        self, f: FixedPointMap, z: State, args: Any = None, *, has_aux: bool = False, differentiable: bool = False
    ) -> None:
        # only the plain form of attention has a second derivative
        attention = sdpa_kernel(SDPBackend.MATH) if differentiable else nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), attention:
            self.z = z.detach().clone().requires_grad_()
            self.fz, self.aux = evaluate(f, self.z, args, has_aux=has_aux)
        self._differentiable = differentiable

    def __call__(self, v: State) -> State:
        """The product with ``v``, of the shape of the point."""
        if not self.fz.requires_grad:
            return torch.zeros_like(v)
        (pulled,) = torch.autograd.grad(
            self.fz, self.z, v, retain_graph=True, create_graph=self._differentiable, allow_unused=True
        )
        return torch.zeros_like(v) if pulled is None else pulled


def jacobian_regularisation(
    f: FixedPointMap, z_star: State, *, samples: int = 1, generator: torch.Generator | None = None
) -> Float[Tensor, ""]:
    r"""The size of the Jacobian at a fixed point, as a term of a training loss that keeps solves short.

    .. math:: \frac{1}{n} \lVert J \rVert_F^2 = \frac{1}{n}\, \mathbb{E}_{v \sim \mathcal{N}(0, I)}
              \lVert J^\top v \rVert^2, \qquad J = \frac{\partial f}{\partial z}(z^*),

    where :math:`n` is the number of elements of a row's state; the mean over the rows is returned. A few draws estimate
    the expectation without bias (Hutchinson). The gradient reaches whatever ``f`` closes over, by a second derivative
    of ``f``; the point itself gets none, as in the paper. :math:`\lVert J \rVert_F^2` bounds the squared spectral
    radius. Fused kernels of Mamba2 have no second derivative: train with ``Mamba2Config(backend="reference")``.

    Args:
        f: the map.
        z_star: its fixed point, ``(batch, *event)``; its history is cut.
        samples: draws of :math:`v`, at least 1; each costs one backward pass through ``f``.
        generator: of the draws. Default: torch's global generator.

    Returns:
        The estimate, a scalar with a graph where gradients are enabled.

    Raises:
        TypeError: ``z_star`` is not a floating-point tensor.
        ValueError: ``z_star`` is empty or not finite, or ``samples`` is below 1.

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
    check_point(z_star)
    check_count("samples", samples)
    differentiable = torch.is_grad_enabled()
    value = squared_gain(Pullback(f, z_star, differentiable=differentiable), samples, generator).mean()
    return value if differentiable else value.detach()


def squared_gain(pullback: Pullback, samples: int, generator: torch.Generator | None) -> Float[Tensor, " batch"]:
    r"""An estimate of :math:`\lVert J \rVert_F^2 / n` for each row: the mean squared gain of random directions."""
    z = pullback.z
    wide = torch.promote_types(z.dtype, torch.float32)
    gains = [pullback(gaussian(z, generator)).to(wide).square().reshape(len(z), -1).mean(dim=1) for _ in range(samples)]
    return torch.stack(gains).mean(dim=0)


def gaussian(like: State, generator: torch.Generator | None) -> State:
    """Normal numbers of the shape, dtype and device of ``like``, drawn on the generator's device."""
    device = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, device=device).to(like)


def check_point(z_star: Tensor) -> None:
    """Raise an error unless ``z_star`` is a finite batch of points."""
    try:
        check_start(z_star)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("z0", "z_star")) from None


def check_count(name: str, value: object) -> None:
    """Raise an error unless the argument is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
