"""A backbone iterated to its fixed point."""

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from deqseq.backbones.base import Backbone, Cache, RealTokens, Sequence, check_sequence
from deqseq.backbones.token_map import BackboneMap
from deqseq.gradients import AttachedGradient, Gradient, Implicit, Phantom, Unrolled
from deqseq.layers.sharded import gathered, sharded_parts
from deqseq.layers.weight_norm import weights_computed_once
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding
from deqseq.solve import Callback
from deqseq.solvers import OutsideSolver, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.sweeps.base import Swept
from deqseq.sweeps.chunked import settled_together

Start = Literal["zero", "input"]
"""Where the iteration begins: at zero, or at the embedded tokens."""


class ImplicitModel(nn.Module):
    r"""The fixed point of a backbone as a function of its input, :math:`z^* = f_\theta(z^*, x)`.

    Any solver, stopping rule, gradient estimator and sweep can be combined; training and evaluation run the same
    code. The iteration starts at zero, as in the paper, or at the embedded tokens: the first self-iteration is then
    the pass of an explicit model of the same layers, plus what the injection adds. Where the solve converges to the
    only fixed point, the start makes no difference; it does where there are several, or the budget is small.

    Args:
        backbone: the map.
        solver: the algorithm.
        stop: tolerances and budget.
        gradient: the estimator.
        eval_solver: the algorithm in eval mode; None: ``solver``.
        eval_stop: tolerances and budget in eval mode; None: ``stop``.
        start: ``"zero"`` or ``"input"``. Gradients reach the embedded tokens through the start only where the
            iteration itself is differentiated (:class:`Unrolled`); the other estimators know them by the injection.

    Raises:
        ValueError: another start.

    References:
        Schöne et al., Implicit Language Models are RNNs: Balancing Parallelization and Expressivity, ICML 2025,
        arXiv 2502.07827, section 3.

    Example:
        >>> import deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6))
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x).value, model.backbone.solution(x), atol=1e-5)
        True
        >>> model(x, sweep=dq.Sequential()).stats.steps.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        backbone: Backbone[Any],
        *,
        solver: Solver | OutsideSolver = Relaxed(0.8),
        stop: Stop = Stop(),
        gradient: Gradient = Phantom(),
        eval_solver: Solver | OutsideSolver | None = None,
        eval_stop: Stop | None = None,
        start: Start = "zero",
    ) -> None:
        super().__init__()
        if start not in get_args(Start):
            raise ValueError(f"ImplicitModel.start must be one of {get_args(Start)}, got {start!r}")
        self.backbone = backbone
        self.solver, self.stop, self.gradient = solver, stop, gradient
        self.eval_solver, self.eval_stop = eval_solver, eval_stop
        self.start = start

    def forward(
        self,
        x: Sequence,
        *,
        mask: RealTokens | None = None,
        cache: Cache | None = None,
        sweep: Sweep = Simultaneous(),
        return_cache: bool = False,
        solver: Solver | OutsideSolver | None = None,
        stop: Stop | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> ModelOutput:
        """Solve for the fixed point of ``x``.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: which tokens are real, ``(batch, length)``; padding on either side of a row leaves the row as it is
                alone, and is zero in the result. None: all.
            cache: what :class:`ModelOutput` returned for the tokens before; None: nothing came before.
            sweep: which tokens are solved together. With an attached gradient estimator it finds the fixed point, and
                the estimator then acts on the whole sequence at once.
            return_cache: whether the cache after these tokens is wanted. It carries no gradient, and comes from the
                evaluation at which each row passed; rows that failed are evaluated once more, at their value.
            solver: instead of the model's own, for this call.
            stop: instead of the model's own, for this call.
            trace: whether to keep residuals; with the simultaneous sweep only.
            callback: called at every look at the residual; with another sweep the steps begin anew for each chunk.

        Returns:
            The states, with the numbers of their solve.

        Raises:
            ValueError: a bad shape; a trace with another sweep than the simultaneous; a gradient of the iteration
                itself (:class:`Unrolled`) with another sweep; or one whose backward pass may be longer in one process
                than in another (:class:`Unrolled`, :class:`Implicit`), while the backbone is sharded over both.
        """
        check_sequence(x, self.backbone.d_model)
        solver = solver or (None if self.training else self.eval_solver) or self.solver
        stop = stop or (None if self.training else self.eval_stop) or self.stop
        gradient = self.gradient if self._wants_gradient(x) else None
        if not isinstance(sweep, Simultaneous):
            _check_gradient(gradient, sweep)
        if sharded_parts(self.backbone):
            _check_sharded(gradient, stop)
        options: dict[str, Any] = {"solver": solver, "stop": stop, "trace": trace, "callback": callback}
        padding = Padding.of(x, mask)
        # a checkpointed backward pass computes the weights again, and must find what the forward pass did
        again = gradient is not None and gradient.recomputes
        with gathered(self.backbone), weights_computed_once(self.backbone, enabled=not again):
            tokens = padding.compact(x)
            whole = BackboneMap(self.backbone, self.backbone.inject(tokens, cache, padding.real), cache)
            swept = _sweep(whole, self._first(tokens, gradient), sweep, return_cache, gradient, options)
        solution = padding.restored(swept.solution)
        return ModelOutput(solution.value, swept.cache, solution.stats, solution.status)

    def compile(self, **options: Any) -> None:
        """Compile the map that is iterated, block by block, with ``torch.compile``; the solve stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        self.backbone.compile(**options)

    def _first(self, tokens: Sequence, gradient: Gradient | None) -> Sequence:
        """Where the iteration begins; padding is zero in either case."""
        if self.start == "zero":
            return torch.zeros_like(tokens, requires_grad=False)
        # a fixed point does not depend on where its solve began: only a differentiated iteration does
        differentiated = gradient is not None and not isinstance(gradient, AttachedGradient)
        return tokens if differentiated else tokens.detach()

    def _wants_gradient(self, x: Sequence) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))


def _check_gradient(gradient: Gradient | None, sweep: Sweep) -> None:
    if gradient is not None and not isinstance(gradient, AttachedGradient):
        raise ValueError(
            f"{type(gradient).__name__} differentiates the iteration itself and needs the Simultaneous sweep, got "
            f"{sweep}: take Phantom, OneStep or Implicit, which need the fixed point alone"
        )


def _check_sharded(gradient: Gradient | None, stop: Stop) -> None:
    """Refuse a backward pass of a length of each process's own: they would wait for each other for ever."""
    own = gradient.stop if isinstance(gradient, Implicit) else stop if isinstance(gradient, Unrolled) else None
    if own is not None and own.check_every < own.max_steps:
        raise ValueError(
            f"{type(gradient).__name__} with {own} takes as many steps backwards as the rows of each process need, "
            "and processes that share a sharded backbone must take equally many: take Phantom or OneStep, or give "
            "Stop.exactly(n)"
        )


def _sweep(
    whole: BackboneMap, z0: Sequence, sweep: Sweep, keep_cache: bool, gradient: Gradient | None, options: dict[str, Any]
) -> Swept:
    """Solve, and attach the gradient: over the whole sequence at once, however it was solved."""
    if gradient is None:
        with torch.no_grad():  # attention then writes its keys in place
            return sweep.solve(whole, z0, keep_cache=keep_cache, **options)
    if isinstance(sweep, Simultaneous):
        chunk = whole.first(whole.length, recording=keep_cache)
        return settled_together(chunk, gradient.apply(chunk, z0, **options), keep_cache)
    assert isinstance(gradient, AttachedGradient)
    with torch.no_grad():
        swept = sweep.solve(whole, z0, keep_cache=keep_cache, **options)
    if torch.is_autocast_enabled(z0.device.type):
        torch.clear_autocast_cache()  # older torch keeps casts made without a graph, which would cut the weights off
    again = whole.first(whole.length, recording=False)
    return replace(swept, solution=replace(swept.solution, value=gradient.attach_to(again, z0, swept.solution)))
