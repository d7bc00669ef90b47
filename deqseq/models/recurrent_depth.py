"""Recurrent depth: layers that run once, a core that is iterated on their output, layers that run once."""

from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor, nn

from deqseq.backbones.base import Cache
from deqseq.check import check_callable, check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.models.explicit import ExplicitModel, check_nothing_to_solve
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.solve import Callback
from deqseq.sweeps.tokens import Counts, Head, Uncommitted
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class RecurrentDepthCache(Cache):
    """What the three parts keep of the committed tokens.

    Attributes:
        prelude: the cache of the layers before.
        core: that of the core.
        coda: that of the layers after.
    """

    prelude: Cache
    core: Cache
    coda: Cache

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept; rows first."""
        return tuple(tensor for part in (self.prelude, self.core, self.coda) for tensor in part.tensors())


class RecurrentDepth(nn.Module):
    r"""An explicit prelude, a core that is iterated on its output, an explicit coda.

    .. math:: e = \mathrm{prelude}(x), \qquad z^* = \mathrm{core}(z^*, e), \qquad y = \mathrm{coda}(\mathrm{norm}(z^*))

    The core decides how the model is solved, and its sweeps, gradients, stopping rules and statistics are those of any
    :class:`ImplicitModel`. Each part keeps a cache of its own; at the fixed point the core needs one entry per token,
    however many iterations it took. With ``ExplicitModel(Looped(backbone, steps))`` as its core the model has a fixed
    depth: nothing is solved, and there is a cache for each step.

    Args:
        prelude: runs once on the embedded tokens.
        core: its input is the prelude's output. An :class:`ImplicitModel` is solved; an :class:`ExplicitModel`, usually
            of a :class:`Looped` backbone, is run.
        coda: runs once on the core's states.
        norm: of the core's states before the coda, as in Huginn. Default: none.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: parts of different widths.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach, 2025, arXiv
        2502.05171.

    Example:
        >>> import torch, deqseq as dq
        >>> def layers(n): return dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, n_layers=n, injection=False))
        >>> backbone = dq.Injected(layers(2), dq.ConcatInjection(16))
        >>> core = dq.ImplicitModel(backbone, dq.SolveConfig(solver=dq.Naive()))
        >>> model = RecurrentDepth(dq.ExplicitModel(layers(1)), core, dq.ExplicitModel(layers(1)))
        >>> output = model(torch.randn(2, 5, 16))       # a new ConcatInjection ignores the state
        >>> output.value.shape, output.stats.iterations
        (torch.Size([2, 5, 16]), tensor([2, 2]))
        >>> lm = dq.CausalLM(50, model)
        >>> lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).tokens.shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        prelude: ExplicitModel,
        core: ImplicitModel | ExplicitModel,
        coda: ExplicitModel,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_type("RecurrentDepth.prelude", prelude, ExplicitModel, "dq.ExplicitModel(backbone)")
        kinds = (ImplicitModel, ExplicitModel)
        check_type("RecurrentDepth.core", core, kinds, "dq.ImplicitModel(dq.Injected(backbone, injection))")
        check_type("RecurrentDepth.coda", coda, ExplicitModel, "dq.ExplicitModel(backbone)")
        check_type("RecurrentDepth.norm", norm, (nn.Module, type(None)))
        widths = [part.backbone.d_model for part in (prelude, core, coda)]
        if len(set(widths)) > 1:
            raise ValueError(f"prelude, core and coda must have the same d_model, got {widths}")
        self.d_model = core.d_model
        self.prelude, self.core, self.coda = prelude, core, coda
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        return_uncommitted: bool = False,
        trace: bool = False,
        callback: Callback | None = None,
        throw: bool = False,
        head: Head | None = None,
        solve: SolveConfig | None = None,
        **fields: Unpack[SolveFields],
    ) -> ModelOutput:
        """Run the prelude; solve for the core's fixed point, or run it; run the coda.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: bool, True at real tokens, ``(batch, length)``; padding may be on either side of a row. Default: no
                padding.
            cache: the ``cache`` of the :class:`ModelOutput` for the tokens before. Default: there are none.
            return_cache: whether to return the cache after these tokens.
            return_uncommitted: whether to return, instead of a cache, what commits any number of these tokens; with the
                simultaneous sweep only.
            trace: whether to keep residuals of the core, as in :meth:`ImplicitModel.forward`.
            callback: called at every check of the core's residual, as in :meth:`ImplicitModel.forward`.
            throw: whether rows that spent their budget or diverged raise an error.
            head: maps the coda's states to logits, ``(rows, length, d_model) -> (rows, length, classes)``, for an exit
                rule that judges these; :class:`deqseq.CausalLM` passes its own. Each check then runs the coda.
            solve: replaces the core's configuration for this call.
            **fields: fields of :class:`SolveConfig` to replace for this call. ``start`` may also be states of the core,
                ``(batch, length, d_model)``. An explicit core takes neither these nor ``trace``, ``callback``,
                ``throw``, ``head`` and ``solve``.

        Returns:
            The coda's states, with the numbers of the core's solve; without any if the core is explicit.

        Raises:
            ConvergenceError: with ``throw``, as in :meth:`ImplicitModel.forward`.
            TypeError, ValueError: as in :meth:`ImplicitModel.forward`, or a cache of another model.
        """
        check_type("cache", cache, (RecurrentDepthCache, type(None)))
        given = isinstance(cache, RecurrentDepthCache)
        before = (cache.prelude, cache.core, cache.coda) if given else (None, None, None)
        every = {"mask": mask, "return_cache": return_cache, "return_uncommitted": return_uncommitted}
        options: dict[str, Any] = {"trace": trace, "callback": callback, "throw": throw, "solve": solve}
        if isinstance(self.core, ExplicitModel):
            check_nothing_to_solve(options | {"head": head}, fields)
            options = {}
        options |= fields
        first = self.prelude(x, cache=before[0], **every)
        room = None if before[2] is None else before[2].reserve(x.shape[1])
        if head is not None:
            check_callable("head", head)
            options["head"] = _CodaHead(self.norm, self.coda, room, head)
        solved = self.core(first.value, cache=before[1], **every, **options)
        last = self.coda(self.norm(solved.value), cache=room, **every)
        after = RecurrentDepthCache(first.cache, solved.cache, last.cache) if return_cache else None
        own = _joined(first.uncommitted, solved.uncommitted, last.uncommitted)
        return ModelOutput(last.value, after, solved.stats, solved.status, solved.problem, own)

    def compile(self, **options: Any) -> None:
        """Compile the layers of all three parts with ``torch.compile``.

        Args:
            **options: those of ``torch.compile``.
        """
        for part in (self.prelude, self.core, self.coda):
            part.compile(**options)


@dataclass(frozen=True)
class _CodaHead:
    """From the core's states to logits, with the cache of the rows that are still computed.

    Padding comes last while the core is solved, so that the logits of real tokens do not depend on it.
    """

    norm: nn.Module
    coda: ExplicitModel
    cache: Cache | None
    head: Head

    def __call__(self, states: Sequence) -> Tensor:
        return self.head(self.coda(self.norm(states), cache=self.cache).value)


def solved_part(model: nn.Module) -> ImplicitModel | None:
    """The part of a model that is solved: itself, or the core of a :class:`RecurrentDepth`; None if it is explicit."""
    part = model.core if isinstance(model, RecurrentDepth) else model
    return part if isinstance(part, ImplicitModel) else None


def _joined(prelude: Uncommitted | None, core: Uncommitted | None, coda: Uncommitted | None) -> Uncommitted | None:
    """What commits the tokens of all parts; a solve of them begins at the core's states."""
    if prelude is None or core is None or coda is None:
        return None

    def commit(counts: Counts) -> Cache:
        return RecurrentDepthCache(prelude.commit(counts), core.commit(counts), coda.commit(counts))

    return Uncommitted(core.states, commit)
