"""How the input enters a core: parts that any backbone can be given."""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn import functional as F

from deqseq.arguments import PositiveInt, Within, checked
from deqseq.backbones.base import Backbone, Cache, GivenBackbone, check_narrow, returned_by
from deqseq.types import Counts, Mask, Sequence


class Injection(nn.Module, ABC):
    """How the input of a solve enters each iteration, before the first layer.

    Your own injection needs both methods. Put what does not depend on the state into
    :meth:`prepare`, which runs once per solve. :class:`Injected` adds it to a backbone.

    Example:
        >>> import deqseq as dq
        >>> class Gated(Injection):
        ...     def prepare(self, x):
        ...         return torch.sigmoid(x)
        ...
        ...     def enter(self, z, prepared):
        ...         return z * prepared
        >>> backbone = Injected(
        ...     dq.Llama(dq.LlamaConfig(d_model=8, n_heads=2, injection=False)), Gated()
        ... )
        >>> dq.ImplicitModel(backbone)(torch.ones(1, 3, 8)).value.shape
        torch.Size([1, 3, 8])
    """

    @abstractmethod
    def prepare(self, x: Sequence) -> Sequence:
        """What each iteration needs of ``x``, ``(batch, length, d_model)``, in the same shape."""

    @abstractmethod
    def enter(self, z: Sequence, prepared: Sequence) -> Sequence:
        """The first layer's input: ``z`` with ``prepared``, each ``(batch, length, d_model)``."""


class AddInjection(Injection):
    r"""The input is added to the state, :math:`z \leftarrow z + x`.

    Example:
        >>> AddInjection().enter(torch.ones(1, 1, 2), torch.ones(1, 1, 2))
        tensor([[[2., 2.]]])
    """

    def prepare(self, x: Sequence) -> Sequence:
        return x

    def enter(self, z: Sequence, prepared: Sequence) -> Sequence:
        return z + prepared


class ConcatInjection(Injection):
    r"""State and input are concatenated and projected, :math:`z \leftarrow W [z; x]`.

    The product with the input is computed once per solve. Initially :math:`W = [g I \mid (1 - g)
    I]`. With a gate of 0, every iteration is one pass of the layers over the input. With another
    gate only the first iteration is, if the solve starts at the input.

    Args:
        d_model: width.
        gate: weight :math:`g` of the state before training, 0 to 1.

    References:
        The adapter of Huginn: Geiping et al., Scaling up Test-Time Compute with Latent Reasoning,
        2025, arXiv 2502.05171.

    Example:
        >>> injection, x = ConcatInjection(2), torch.ones(1, 1, 2)
        >>> torch.equal(injection.enter(torch.zeros(1, 1, 2), injection.prepare(x)), x)
        True
    """

    @checked
    def __init__(
        self, d_model: PositiveInt, gate: Annotated[float | int, Within("[0, 1]")] = 0.0
    ) -> None:
        super().__init__()
        self.d_model, same = d_model, torch.eye(d_model)
        self.weight = nn.Parameter(torch.cat([gate * same, (1 - gate) * same], dim=1))

    def prepare(self, x: Sequence) -> Sequence:
        return x @ self.weight[:, x.shape[-1] :].T

    def enter(self, z: Sequence, prepared: Sequence) -> Sequence:
        return z @ self.weight[:, : z.shape[-1]].T + prepared


class DecayInjection(Injection):
    r"""The state decays, and the projected input is added.

    .. math:: z \leftarrow \exp(-\Delta\, e^{a}) \odot z + \Delta \odot W x, \qquad
              \Delta = \mathrm{softplus}(d)

    Here :math:`a` and :math:`d` are learned per channel. This linear part contracts for any
    weights; the layers that follow may still expand.

    Args:
        d_model: width.
        decay: the initial factor of the state, float between 0 and 1.

    References:
        Prairie et al., Parcae: Scaling Laws for Stable Looped Language Models, 2026.

    Example:
        >>> injection, z = DecayInjection(2, decay=0.5), torch.ones(1, 1, 2)
        >>> injection.enter(z, torch.zeros(1, 1, 2))
        tensor([[[0.5000, 0.5000]]], grad_fn=<AddBackward0>)
    """

    @checked
    def __init__(
        self, d_model: PositiveInt, decay: Annotated[float, Within("(0, 1)")] = 0.5
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.log_rate = nn.Parameter(torch.full((d_model,), math.log(-math.log(decay))))
        self.step = nn.Parameter(torch.full((d_model,), math.log(math.e - 1)))  # its softplus is 1
        self.projection = nn.Linear(d_model, d_model, bias=False)
        nn.init.eye_(self.projection.weight)

    def prepare(self, x: Sequence) -> Sequence:
        return F.softplus(self.step) * self.projection(x)

    def enter(self, z: Sequence, prepared: Sequence) -> Sequence:
        return torch.exp(-F.softplus(self.step) * self.log_rate.exp()) * z + prepared


class Injected(Backbone[Any]):
    r"""A backbone whose input enters by an :class:`Injection`.

    .. math:: f(z, x) = g(\mathrm{enter}(z, x))

    :class:`deqseq.Mamba2` and :class:`deqseq.Llama` contain the paper's injection, into the
    projections of every layer; to use them here, build them with ``injection=False``.

    Args:
        backbone: the layers :math:`g`.
        injection: how the input enters.

    Raises:
        ValueError: the backbone was built with an ``injection`` of its own, or the injection has
            another ``d_model``.

    Example:
        >>> import deqseq as dq
        >>> layers = dq.Llama(dq.LlamaConfig(d_model=8, n_heads=2, injection=False))
        >>> model = dq.ImplicitModel(Injected(layers, ConcatInjection(8)))
        >>> model(torch.ones(1, 3, 8), sweep=dq.Sequential()).value.shape
        torch.Size([1, 3, 8])
    """

    @checked
    def __init__(self, backbone: GivenBackbone, injection: Injection) -> None:
        super().__init__()
        if getattr(backbone, "injection", None) is not None:
            raise ValueError(
                "Injected.backbone must have no injection of its own: build it with "
                "injection=False, or give an attribute that is something else another name than "
                "`injection`"
            )
        check_narrow("Injected.backbone", backbone)
        width = getattr(injection, "d_model", backbone.d_model)
        if width != backbone.d_model:
            raise ValueError(
                f"Injected.injection must have the backbone's d_model, {backbone.d_model}, got "
                f"{width}"
            )
        self.d_model = backbone.d_model
        self.backbone, self.injection = backbone, injection

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner backbone is."""
        return self.backbone.causal

    def prepare(
        self, x: Sequence, cache: Cache | None = None, mask: Mask | None = None
    ) -> tuple[Sequence, Any]:
        name = f"{type(self.injection).__name__}.prepare"
        prepared = returned_by(name, self.injection.prepare, x, like=x, what="x")
        return prepared, self.backbone.prepare(x, cache, mask)

    def forward(
        self,
        z: Sequence,
        inputs: tuple[Sequence, Any],
        cache: Cache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, Any]:
        prepared, inner = inputs
        name = f"{type(self.injection).__name__}.enter"
        entered = returned_by(name, self.injection.enter, z, prepared, like=z, what="z")
        return self.backbone(entered, inner, cache, need_aux=need_aux)

    def advance(
        self, cache: Cache | None, aux: Any, tokens: int, counts: Counts | None = None
    ) -> Cache:
        return self.backbone.advance(cache, aux, tokens, counts)

    def compile(self, **options: Any) -> None:
        self.backbone.compile(**options)
