"""Backbones that wrap another one: its input enters differently, or it runs several times."""

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import PositiveInt, Within, check_argument, checked
from deqseq.backbones.base import (
    Backbone,
    Cache,
    GivenBackbone,
    JointCache,
    check_narrow,
    parts_of,
    returned_by,
)
from deqseq.start import Start, initial_state
from deqseq.step import evaluate
from deqseq.types import Counts, Mask, Sequence


class Injection(nn.Module, ABC):
    """How the input of a solve enters each iteration, before the first layer.

    :class:`Injected` adds an injection to a backbone. Your own needs both methods. Put what does
    not depend on the state into :meth:`prepare`, which runs once per solve. A solve that begins at
    zero needs an ``enter(0, prepared)`` that depends on the input.

    Example:
        >>> from deqseq import Injected, Injection
        >>> import torch, deqseq as dq
        >>> class Halves(Injection):
        ...     def prepare(self, x):
        ...         return torch.tanh(x)
        ...
        ...     def enter(self, z, prepared):
        ...         return (z + prepared) / 2
        >>> backbone = Injected(
        ...     dq.Llama(dq.LlamaConfig(d_model=8, n_heads=2, injection=False)), Halves()
        ... )
        >>> model = dq.ImplicitModel(backbone)
        >>> bool((model(torch.ones(1, 3, 8)).value - model(-torch.ones(1, 3, 8)).value).any())
        True
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
        >>> import torch
        >>> from deqseq import AddInjection
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
    I]`, with the gate :math:`g`. If it is 0, every iteration is one pass of the layers over the
    input; if not, only the first iteration is, and only if the solve starts at the input.

    Args:
        d_model: width.
        gate: weight :math:`g` of the state before training, 0 to 1.

    References:
        The adapter of Huginn: Geiping et al., Scaling up Test-Time Compute with Latent Reasoning,
        2025, arXiv 2502.05171.

    Example:
        >>> import torch
        >>> from deqseq import ConcatInjection
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
        >>> import torch
        >>> from deqseq import DecayInjection
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
        >>> import torch, deqseq as dq
        >>> from deqseq import ConcatInjection, Injected
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


class LoopedInputs(NamedTuple):
    """The inputs of the inner backbone, and the loop's first states; None: those it is given."""

    inner: Any
    start: Sequence | None


class Looped(Backbone[JointCache]):
    r"""A backbone that runs another one a fixed number of times, with a cache for each step.

    .. math:: z_s = f_\theta(z_{s-1}, x), \quad s = 1, \ldots, S, \qquad
              F(z, x) = z_S

    Step :math:`s` of a token reads step :math:`s` of the tokens before it. So decoding with the
    cache equals the forward pass of the whole sequence, and the cache is :math:`S` times larger.
    All steps are differentiated. ``ExplicitModel(Looped(backbone, steps))`` is a looped
    transformer. ``steps`` and ``start`` can be changed later.

    Args:
        backbone: the map :math:`f_\theta`. Its input enters every step; all steps share its dropout
            masks.
        steps: how often it runs, :math:`S \ge 1`.
        start: :math:`z_0`, where the loop begins: ``"input"``, ``"zero"``, a
            :class:`~deqseq.RandomStart`, or states, ``(batch, length, d_model)``. ``"input"`` is
            the state :math:`z`, which an :class:`~deqseq.ExplicitModel` sets to the input.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    References:
        Dehghani et al., Universal Transformers, ICLR 2019, arXiv 1807.03819. Zhu et al., Scaling
        Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> from deqseq import Looped
        >>> import torch, deqseq as dq
        >>> layers = dq.Llama(dq.LlamaConfig(d_model=8, n_heads=2, injection=False))
        >>> model, x = dq.ExplicitModel(Looped(layers, steps=4)), torch.randn(1, 5, 8)
        >>> whole, first = model(x).value, model(x[:, :3], return_cache=True)
        >>> last = model(x[:, 3:], cache=first.cache).value
        >>> torch.allclose(torch.cat([first.value, last], dim=1), whole, atol=1e-5)
        True
    """

    @checked
    def __init__(
        self,
        backbone: GivenBackbone,
        steps: PositiveInt,
        start: Start | Tensor = "input",
    ) -> None:
        super().__init__()
        check_narrow("Looped.backbone", backbone)
        self.d_model = backbone.d_model
        self.backbone, self.steps = backbone, steps
        self.start: Start | Tensor = start

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("steps", "start"):
            check_argument(Looped.__init__, name, value)
        super().__setattr__(name, value)

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner backbone is."""
        return self.backbone.causal

    def prepare(
        self, x: Sequence, cache: JointCache | None = None, mask: Mask | None = None
    ) -> LoopedInputs:
        """Prepare the inputs of the inner backbone and the first states, once for all steps.

        Raises ValueError for a cache of other steps, states of another shape, and a loop that never
        sees its input.
        """
        # where the tokens stand is the same in every step, so any step's cache will do
        inner = self.backbone.prepare(x, parts_of(cache, self.steps, "steps")[0], mask)
        if not isinstance(self.start, Tensor):
            if self.start == "input":
                return LoopedInputs(inner, None)
            if not self.backbone.sees_input(inner):
                raise ValueError(
                    f"Looped.start is {self.start}, and this {type(self.backbone).__name__} was "
                    "built without an injection, so nothing would depend on the input: build it "
                    "with injection=True, wrap it as dq.Injected(backbone, dq.AddInjection()), or "
                    'take start="input"'
                )
        return LoopedInputs(inner, initial_state(self.start, x))

    def sees_input(self, inputs: LoopedInputs) -> bool:
        return inputs.start is not None or self.backbone.sees_input(inputs.inner)

    def forward(
        self,
        z: Sequence,
        inputs: LoopedInputs,
        cache: JointCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[Any, ...] | None]:
        if inputs.start is not None:
            z = inputs.start.contiguous()  # other strides would be compiled again
        auxes: list[Any] = []
        for step_cache in parts_of(cache, self.steps, "steps"):
            f = partial(self.backbone, inputs=inputs.inner, cache=step_cache, need_aux=need_aux)
            z, aux = evaluate(f, z, has_aux=True)
            auxes.append(aux)
        return z, tuple(auxes) if need_aux else None

    def advance(
        self,
        cache: JointCache | None,
        aux: tuple[Any, ...],
        tokens: int,
        counts: Counts | None = None,
    ) -> JointCache:
        parts = []
        for step_cache, step_aux in zip(parts_of(cache, len(aux), "steps"), aux, strict=True):
            parts.append(self.backbone.advance(step_cache, step_aux, tokens, counts))
        return JointCache(tuple(parts), "steps")

    def compile(self, **options: Any) -> None:
        self.backbone.compile(**options)
