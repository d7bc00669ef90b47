"""Recurrent depth: layers that run once, a core that is iterated on their output, layers that run
once.
"""

from typing import Any

import torch
from torch import nn

from deqseq.arguments import checked
from deqseq.backbones.base import Cache, JointCache, check_narrow, parts_of, returned_by
from deqseq.models.base import OTHER_EVALUATION, ExplicitModel, Model, Uncommitted
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import Evaluation, ModelOutput
from deqseq.start import Start
from deqseq.types import Counts, Mask, Sequence, Step


class RecurrentDepth(Model):
    r"""A prelude that runs once, a core that is iterated on its output, a coda that runs once.

    .. math:: e = \mathrm{prelude}(x), \qquad z^* = \mathrm{core}(z^*, e), \qquad y =
    \mathrm{coda}(\mathrm{norm}(z^*))

    The core decides how the model is solved: sweeps, gradients, stopping rules and statistics are
    those of an :class:`ImplicitModel`. Each part has its own cache. The core needs one cache entry
    per token, whatever the number of iterations. With ``ExplicitModel(Looped(backbone, steps))`` as
    the core, the depth is fixed: nothing is solved, and each step has its own cache.

    Args:
        prelude: runs once on the embedded tokens.
        core: its input is the prelude's output. An :class:`ImplicitModel` is solved; an
            :class:`ExplicitModel`, usually of a :class:`Looped` backbone, is run.
        coda: runs once on the core's states.
        norm: applied to the core's states before the coda, as in Huginn. Default: none.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: parts of different widths.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth
        Approach, 2025, arXiv 2502.05171.

    Example:
        >>> from deqseq import RecurrentDepth
        >>> import torch, deqseq as dq
        >>> def layers(n):
        ...     return dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, n_layers=n, injection=False))
        >>> backbone = dq.Injected(layers(2), dq.ConcatInjection(16))
        >>> core = dq.ImplicitModel(backbone, dq.SolveConfig(solver=dq.Naive()))
        >>> model = RecurrentDepth(dq.ExplicitModel(layers(1)), core, dq.ExplicitModel(layers(1)))
        >>> output = model(torch.randn(2, 5, 16))  # a new ConcatInjection ignores the state
        >>> output.value.shape, output.stats.iterations.unique()
        (torch.Size([2, 5, 16]), tensor([2]))
        >>> lm = dq.CausalLM(50, model)
        >>> lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).tokens.shape
        torch.Size([1, 4])
    """

    @checked
    def __init__(
        self,
        prelude: ExplicitModel,
        core: ImplicitModel | ExplicitModel,
        coda: ExplicitModel,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        widths = [part.backbone.d_model for part in (prelude, core, coda)]
        if len(set(widths)) > 1:
            raise ValueError(f"prelude, core and coda must have the same d_model, got {widths}")
        check_narrow("core", core.backbone)
        self.d_model = widths[0]
        self.prelude, self.core, self.coda = prelude, core, coda
        self.norm = nn.Identity() if norm is None else norm

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all three parts are causal."""
        return self.prelude.causal and self.core.causal and self.coda.causal

    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Run the prelude, solve for the core's fixed point, run the coda; the statistics are the
        core's.

        All arguments are those of :meth:`deqseq.ImplicitModel.forward`: ``x``, ``(batch, length,
        d_model)``, ``mask``, ``(batch, length)``, ``cache``, ``return_cache``, and ``options`` of
        the core. An explicit core takes no options.

        Raises:
            ConvergenceError, TypeError, ValueError: as there, or a cache of another model.
        """
        prelude, core, coda = parts_of(cache, 3, "parts")
        every: Any = {"mask": mask, "return_cache": return_cache}
        first = self.prelude(x, cache=prelude, **every)
        solved = self.core(first.value, cache=core, **every, **options)
        last = self.coda(self._normed(solved.value), cache=coda, **every)
        caches: Any = first.cache, solved.cache, last.cache
        after = JointCache(caches, "parts") if return_cache else None
        return ModelOutput(last.value, after, solved.stats, solved.status, solved.call)

    @torch.no_grad()
    def evaluate(
        self,
        x: Sequence,
        cache: Cache | None = None,
        start: Start | Sequence | None = None,
        iterations: int = 1,
        step: Step | None = None,
    ) -> Evaluation:
        prelude, core, coda = parts_of(cache, 3, "parts")
        first = self.prelude.evaluate(x, prelude)
        solved = self.core.evaluate(first.value, core, start, iterations, step)
        last = self.coda.evaluate(self._normed(solved.value), coda)
        return Evaluation(solved.point, solved.states, last.value, (first, solved, last))

    @checked
    def commit(
        self, cache: Cache | None, evaluation: Evaluation, counts: Counts | None = None
    ) -> Cache:
        if isinstance(evaluation.aux, Uncommitted):
            raise ValueError(OTHER_EVALUATION)
        models = self.prelude, self.core, self.coda
        caches = []
        for i, part in enumerate(parts_of(cache, 3, "parts")):
            caches.append(models[i].commit(part, evaluation.aux[i], counts))
        return JointCache(tuple(caches), "parts")

    def _normed(self, states: Sequence) -> Sequence:
        return returned_by(
            "RecurrentDepth.norm", self.norm, states, like=states, what="the core's states"
        )

    def compile(self, **options: Any) -> None:
        for part in (self.prelude, self.core, self.coda):
            part.compile(**options)


def solved_part(model: nn.Module) -> ImplicitModel | None:
    """The part of a model that is solved: itself, or the core of a :class:`RecurrentDepth`; None if
    it is explicit.
    """
    part = model.core if isinstance(model, RecurrentDepth) else model
    return part if isinstance(part, ImplicitModel) else None


def check_adapters(model: nn.Module, adapters: Any) -> None:
    """Refuse adapters of PEFT that choose layers by number, which every part counts from 0.

    Args:
        model: the part of a language model between embedding and head.
        adapters: PEFT's configurations by name, which it sets as ``peft_config`` of a model.
    """
    if not isinstance(model, RecurrentDepth):
        return
    for config in adapters.values():
        numbers = getattr(config, "layers_to_transform", None)
        if numbers is not None:
            raise ValueError(
                f"layers_to_transform must be left out, got {numbers}: prelude, core and coda each "
                "count their layers from 0. Make the model again, and choose layers by their "
                "names, as target_modules=r'.*core\\.backbone\\..*layers\\.0\\..*q_proj'"
            )
