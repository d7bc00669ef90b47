"""A fixed number of iterations as a backbone of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.arguments import PositiveInt, check_argument, checked
from deqseq.backbones.base import (
    Backbone,
    GivenBackbone,
    JointCache,
    check_narrow,
    parts_of,
    returned_by,
)
from deqseq.start import Start, initial_state
from deqseq.step import evaluate
from deqseq.types import Counts, Mask, Sequence

Choose = Callable[[Float[Tensor, "steps batch length d_model"]], Sequence]
"""From the states of all steps to those of the result."""


class LoopedInputs(NamedTuple):
    """The inputs of the inner backbone, and the loop's first states; None: those it is given."""

    inner: Any
    start: Sequence | None


class Looped(Backbone[JointCache]):
    r"""A backbone that runs another one a fixed number of times, with a cache for each step.

    .. math:: z_s = f_\theta(z_{s-1}, x), \quad s = 1, \ldots, S, \qquad
              F(z, x) = \mathrm{choose}(z_1, \ldots, z_S)

    Step :math:`s` of a token reads step :math:`s` of the tokens before it. So decoding with the
    cache equals the forward pass of the whole sequence, and the cache is :math:`S` times larger.
    All steps are differentiated. ``ExplicitModel(Looped(backbone, steps))`` is a looped
    transformer. ``steps``, ``choose`` and ``start`` can be changed later.

    Args:
        backbone: the map :math:`f_\theta`. Its input enters every step; all steps share its dropout
            masks.
        steps: how often it runs, :math:`S \ge 1`.
        choose: combines the states of all steps into the result: a function or module
            ``(steps, batch, length, d_model) -> (batch, length, d_model)``. Default: the states of
            the last step.
        start: :math:`z_0`, where the loop begins: ``"input"``, ``"zero"``, a
            :class:`~deqseq.RandomStart`, or states, ``(batch, length, d_model)``. ``"input"`` is
            the state :math:`z`, which an :class:`~deqseq.ExplicitModel` sets to the input.

    Raises:
        TypeError, ValueError: names the argument, the value given and what is expected.

    References:
        Dehghani et al., Universal Transformers, ICLR 2019, arXiv 1807.03819. Zhu et al., Scaling
        Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741, whose exit gate is a
        ``choose``.

    Example:
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
        choose: Choose | None = None,
        start: Start | Tensor = "input",
    ) -> None:
        super().__init__()
        check_narrow("Looped.backbone", backbone)
        self.d_model = backbone.d_model
        self.backbone, self.steps, self.choose = backbone, steps, choose
        self.start: Start | Tensor = start

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("steps", "choose", "start"):
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
        states: list[Tensor] = []
        auxes: list[Any] = []
        for step_cache in parts_of(cache, self.steps, "steps"):
            f = partial(self.backbone, inputs=inputs.inner, cache=step_cache, need_aux=need_aux)
            z, aux = evaluate(f, z, has_aux=True)
            auxes.append(aux)
            if self.choose is not None:  # without a choice, earlier states need not be kept
                states.append(z)
        if self.choose is not None:
            stack, what = torch.stack(states), "the states of one step"
            z = returned_by("Looped.choose", self.choose, stack, like=z, what=what).to(z.dtype)
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
