"""What a training loop calls: parameter groups, a penalty and a check of the loss."""

import math
from contextlib import nullcontext
from numbers import Real
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq.arguments import Function, NonNegativeInt, PositiveInt, Within, checked, shown
from deqseq.layers.rms_norm import GatedRMSNorm, RMSNorm
from deqseq.step import check_start, evaluate
from deqseq.types import FixedPointMap, State, float32_at_least

NORMS = (RMSNorm, GatedRMSNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
STATE_SPACE = ("A_log", "D", "dt_bias")
MAGNITUDE = "original0"  # what torch calls the g of a weight-normalised w = g v / |v|


@checked
def parameter_groups(
    model: nn.Module, weight_decay: Annotated[float | int, Within("[0, inf)")] = 0.1
) -> list[dict[str, Any]]:
    r"""The parameters of a model in two groups for an optimizer: with weight decay, and without.

    These are not decayed: embeddings and a head tied to one; scales of norms; biases, ``dt_bias``,
    ``D`` and ``A_log``; and the magnitudes :math:`g` of weight-normalised maps, :math:`w = g\, v /
    \lVert v \rVert`. All other parameters of two dimensions or more are decayed, including the
    directions :math:`v`. The gradient of :math:`v` is orthogonal to it, so every step makes it
    longer; decay keeps its length, and so the rate at which it turns, from drifting.

    Args:
        model: any module, of this library or of transformers.
        weight_decay: weight decay of the first group, at least 0.

    Returns:
        The two groups, in this order, each in the order of ``model.named_parameters()``. Tied
        parameters occur once, frozen ones not at all; a group may be empty.

    Raises:
        ValueError: a negative or not finite decay, or a model in which no parameter requires a
            gradient.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868. van Laarhoven, L2
        Regularization versus Batch and Weight Normalization, 2017, arXiv 1706.05350.

    Example:
        >>> from deqseq.training import parameter_groups
        >>> import torch, deqseq as dq
        >>> lm = dq.CausalLM(
        ...     10, dq.ImplicitModel(dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, mlp_width=32)))
        ... )
        >>> optimizer = torch.optim.AdamW(parameter_groups(lm, 0.1), lr=1e-3, betas=(0.9, 0.95))
        >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.1, 8), (0.0, 14)]
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameter that wants a gradient")
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    decayed, others = groups
    for parameter, tied in names.items():
        is_decayed = parameter.ndim > 1 and all(_is_decayed(modules, name) for name in tied)
        group = decayed if is_decayed else others
        group["params"].append(parameter)
    return groups


def _is_decayed(modules: dict[str, nn.Module], name: str) -> bool:
    """Whether a parameter is decayed, by its name and the module that it belongs to."""
    path, _, last = name.rpartition(".")
    owner = path.removesuffix("parametrizations." + path.rpartition(".")[2]).removesuffix(".")
    module = modules[owner]
    if owner == path:  # torch.nn.utils.weight_norm, the older one, names g weight_g
        is_magnitude = last.endswith("_g") and hasattr(module, f"{last[:-1]}v")
    else:
        is_magnitude = last == MAGNITUDE
    return not (is_magnitude or last in STATE_SPACE or isinstance(module, (nn.Embedding, *NORMS)))


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
    A few draws estimate it without bias (Hutchinson); of one row, :math:`n` times this value bounds
    the squared spectral radius. Tensors that ``f`` closes over get a gradient, by a second
    derivative of ``f``; the point itself gets none, as in the paper. Fused kernels of Mamba2 have
    no second derivative: train with ``Mamba2Config(backend="reference")``.

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
        >>> import torch
        >>> from deqseq.training import jacobian_regularisation
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


class NonFiniteLoss(FloatingPointError):
    """The loss, or another number that the next training step depends on, is NaN or infinite.

    Example:
        >>> from deqseq.training import NonFiniteLoss
        >>> issubclass(NonFiniteLoss, ArithmeticError)
        True
    """


@checked
def check_finite(
    value: Any,
    *,
    step: NonNegativeInt,
    phase: str | None = None,
    quantity: str = "loss",
) -> float:
    """Stop a run whose loss is NaN or infinite; a finite value is returned, for the log.

    Call it with the loss before ``backward()``, and with the gradient norm before the optimizer's
    step. On a GPU this waits for the value. With several processes, pass the mean over all of them,
    so that all stop together.

    Args:
        value: a real number, or a tensor with one element.
        step: number of finished optimizer steps.
        phase: the curriculum's phase, for the message.
        quantity: what the value is.

    Raises:
        NonFiniteLoss: NaN or infinity; names step and phase.
        TypeError: not a number; None, from a model that was not given targets.
        ValueError: a tensor of several numbers.

    Example:
        >>> from deqseq.training import check_finite
        >>> import torch
        >>> check_finite(torch.tensor(0.5), step=3)
        0.5
        >>> check_finite(float("nan"), step=3, phase="free")
        Traceback (most recent call last):
        deqseq.training.loop.NonFiniteLoss: the loss is nan after step 3 in phase 'free': stopped
        before the weights are updated
    """
    wanted = f"value must be the {quantity}, one number"
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.is_meta:
            raise ValueError(f"{wanted}, got {shown(value)}")
    elif not isinstance(value, Real) or isinstance(value, bool):
        hint = ": a model returns its loss if it is given targets" if value is None else ""
        raise TypeError(f"{wanted}, got {value!r}{hint}")
    number = float(value)
    if not math.isfinite(number):
        where = "" if phase is None else f" in phase {phase!r}"
        raise NonFiniteLoss(
            f"the {quantity} is {number} after step {step}{where}: stopped before the weights are "
            "updated"
        )
    return number
