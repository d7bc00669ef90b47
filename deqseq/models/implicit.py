"""A backbone iterated to its fixed point."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from deqseq.backbones.base import Backbone, Cache, Inputs, check_sequence
from deqseq.check import check_callable, check_flag, check_integer, check_type
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.exits import check_exit
from deqseq.explain import Problem
from deqseq.gradients import Gradient, Implicit, Reversible, Unrolled
from deqseq.layers.sharded import sharded_parts, unsharded
from deqseq.layers.weight_norm import cached_weights
from deqseq.models.eval_mode import eval_mode
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding
from deqseq.models.start import check_states, start_states
from deqseq.solution import ConvergenceWarning, Status
from deqseq.solve import Callback
from deqseq.solvers import ExternalSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Lockstep, Simultaneous
from deqseq.sweeps.lockstep import backbone_cache, last_iteration
from deqseq.sweeps.run import run_sweep
from deqseq.sweeps.tokens import Head, TokenArgs, Uncommitted, commit
from deqseq.types import Mask, Sequence


class ImplicitModel(nn.Module):
    r"""The fixed point of a backbone as a function of its input, :math:`z^* = f_\theta(z^*, x)`.

    Training and evaluation run the same code. Where the solve converges to the only fixed point, solver, sweep and
    start make no difference to the result; they do where there are several fixed points, or the budget is small.

    Args:
        backbone: the map.
        solve: how its fixed point is found and differentiated. Default: :class:`SolveConfig`'s defaults.
        eval_solve: the same in eval mode. Default: ``solve``.

    Raises:
        TypeError: an argument of the wrong type.

    References:
        Schöne et al., Implicit Language Models are RNNs: Balancing Parallelization and Expressivity, ICML 2025,
        arXiv 2502.07827, section 3.

    Example:
        >>> import deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6)))
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x, throw=True).value, model.backbone.solution(x), atol=1e-5)
        True
        >>> model(x, sweep=dq.Sequential()).stats.iterations.shape     # any field can be replaced for one call
        torch.Size([2, 3])
    """

    def __init__(
        self, backbone: Backbone[Any], solve: SolveConfig = SolveConfig(), eval_solve: SolveConfig | None = None
    ) -> None:
        super().__init__()
        if not isinstance(backbone, Backbone):
            raise TypeError(
                f"backbone must be a deqseq.Backbone, such as Mamba2(Mamba2Config(...)), got {backbone!r}; for the "
                "fixed point of a function use deqseq.fixed_point(f, z0)"
            )
        check_integer("backbone.d_model", getattr(backbone, "d_model", None), 1)
        self.backbone = backbone
        check_type("solve", solve, SolveConfig, _EXAMPLE)
        check_type("eval_solve", eval_solve, (SolveConfig, type(None)), _EXAMPLE)
        self.solve, self.eval_solve = solve, eval_solve
        self._warned = False

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
        """Solve for the fixed point of ``x``.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: bool, True at real tokens, ``(batch, length)``. Padding may be on either side of a row; it leaves the
                row as it is alone, and is zero in the result. Default: no padding.
            cache: the ``cache`` of the :class:`ModelOutput` for the tokens before. Default: there are none.
            return_cache: whether to return the cache after these tokens. It carries no gradient, and comes from the
                evaluation at which each row passed; failed rows whose best value is not their last are evaluated once
                more.
            return_uncommitted: whether to return, instead of a cache, what commits any number of these tokens; with the
                simultaneous sweep only.
            trace: whether to keep residuals; with the simultaneous sweep only.
            callback: called with a :class:`Progress` at every check of the residual. Its ``iteration`` starts again at
                each chunk; that of a sliding window counts the whole solve. Residuals per token are of the real tokens
                first, whatever the padding.
            throw: whether rows that spent their budget or diverged raise an error; in :class:`Lockstep`, which has no
                tolerance, those that diverged.
            head: maps states to logits, ``(rows, length, d_model) -> (rows, length, classes)``, for an exit rule that
                judges these; :class:`deqseq.CausalLM` passes its own.
            solve: replaces the model's configuration for this call.
            **fields: fields of :class:`SolveConfig` to replace for this call: ``solver``, ``stop``, ``gradient``,
                ``sweep``, ``start``; the latter may also be the states to begin from, ``(batch, length, d_model)``, or
                those of the first tokens alone: the others then begin where the model does.

        Returns:
            The states, with the numbers of their solve. In training mode the value is what the estimator gives, with
            its phantom steps, say; in eval mode it is that of the solve, whether gradients are enabled or not.

        Warns:
            ConvergenceWarning: in eval mode, once per model: most rows spent their budget without converging.

        Raises:
            ConvergenceError: with ``throw``, names the rows that failed, their residuals and a remedy.
            TypeError: an unknown keyword, or a value of the wrong type.
            ValueError: a bad shape; a trace with another sweep than the simultaneous; :class:`Unrolled` with another
                sweep than that and :class:`Lockstep`; an exit rule with a sweep that has none, or without the head that
                it needs; an estimator whose backward pass may be longer in one process than in another
                (:class:`Unrolled`, :class:`Implicit`) while the backbone is sharded over both.
        """
        start = fields.get("start")
        start = start if isinstance(start, Tensor) else None
        if start is not None:
            del fields["start"]
        config = resolve(self.solve_config, solve, fields)
        check_sequence(x, self.backbone.d_model)
        if start is not None:
            check_states(start, x)
        check_type("cache", cache, (Cache, type(None)))
        flags = {"return_cache": return_cache, "return_uncommitted": return_uncommitted, "trace": trace, "throw": throw}
        _check_options(flags, {"callback": callback, "head": head})
        check_exit(config.stop.exit, head)
        gradient = config.gradient if self._requires_gradient(x, start) else None
        if sharded_parts(self.backbone):
            _check_sharded(gradient, config.stop)
        padding = Padding.of(x, mask)
        # a checkpointed backward pass computes the weights again, and must find what the forward pass did
        recomputes = gradient is not None and gradient.checkpoint
        with unsharded(self.backbone), cached_weights(self.backbone, enabled=not recomputes):
            tokens = padding.compact(x)
            inputs = self.backbone.prepare(tokens, backbone_cache(cache, config.sweep), padding.mask)
            if config.start != "input" and start is None:
                _check_injection(inputs, self.backbone)
            args = TokenArgs(inputs, cache, padding.mask, head if config.stop.exit is not None else None)
            args = args.with_room(x.shape[1]) if return_uncommitted else args
            solution, after = run_sweep(
                self.backbone,
                args,
                start_states(tokens, start, padding, config, gradient),
                config,
                gradient=gradient,
                keep_value=not self.training,
                keep_aux=return_uncommitted,
                need_cache=return_cache,
                trace=trace,
                callback=callback,
            )
        solution = padding.restored(solution)
        again = partial(self._again, x.detach(), mask, cache, config, start)
        problem = Problem(config.solver, _asked(config), again)
        states = solution.value.detach()
        commits = partial(commit, self.backbone, args, solution.aux, states)
        own = Uncommitted(states, commits) if return_uncommitted else None
        output = ModelOutput(solution.value, after, solution.stats, solution.status, problem, own)
        self._warn_once(output, config)
        fixed = isinstance(config.sweep, Lockstep)  # has no tolerance, so that rows can only diverge
        throw = throw and (not fixed or bool((solution.status == Status.DIVERGED).any()))
        return output.raise_if_failed() if throw else output

    @property
    def d_model(self) -> int:
        """Width of the states."""
        return self.backbone.d_model

    @property
    def solve_config(self) -> SolveConfig:
        """The configuration in the current mode: ``eval_solve`` in eval mode if there is one, else ``solve``."""
        return self.solve if self.training or self.eval_solve is None else self.eval_solve

    def compile(self, **options: Any) -> None:
        """Compile the map that is iterated with ``torch.compile``; the loop around it stays as it is.

        Args:
            **options: those of ``torch.compile``.
        """
        self.backbone.compile(**options)

    @torch.no_grad()
    def _again(
        self,
        x: Sequence,
        mask: Mask | None,
        cache: Cache | None,
        config: SolveConfig,
        given: Sequence | None,
        solver: Solver[Any] | ExternalSolver,
        stop: Stop,
        start: Sequence | None,
        trace: bool,
    ) -> ModelOutput:
        """The same call solved in another way, for :meth:`ModelOutput.explain`."""
        config = replace(config, solver=solver, stop=stop, sweep=Simultaneous())
        cache = last_iteration(cache)
        start = given if start is None else start
        fields: SolveFields = {} if start is None else {"start": start}
        warned, self._warned = self._warned, True  # what is tried out is no failure of the caller's
        try:
            with eval_mode(self):  # dropout would make every solve one of another map
                return self(x, mask=mask, cache=cache, trace=trace, solve=config, **fields)
        finally:
            self._warned = warned

    def _warn_once(self, output: ModelOutput, config: SolveConfig) -> None:
        """Tell of the first solve in eval mode that spends its budget on most rows, unless no row could converge."""
        stop, fixed = config.stop, isinstance(config.sweep, Lockstep)
        if self.training or self._warned or torch.compiler.is_compiling() or stop.rtol == stop.atol == 0 or fixed:
            return
        assert output.status is not None
        failed = int((output.status == Status.MAX_STEPS_REACHED).sum())
        if 2 * failed > len(output.status):
            self._warned = True
            warnings.warn(
                f"{failed} of {len(output.status)} rows spent the budget of {stop.max_steps} iterations without "
                "converging, so their values are not fixed points. print(output.explain()) says why and what to do. "
                "(Later calls of this model do not warn.)",
                ConvergenceWarning,
                stacklevel=5,
            )

    def _requires_gradient(self, *tensors: Tensor | None) -> bool:
        given = any(x is not None and x.requires_grad for x in tensors)
        return torch.is_grad_enabled() and (given or any(p.requires_grad for p in self.parameters()))


_EXAMPLE = "dq.SolveConfig(solver=dq.Anderson())"


def _asked(config: SolveConfig) -> Stop:
    """The stopping rule, with the budget that the sweep has; :class:`Lockstep` has no tolerance."""
    sweep, stop = config.sweep, config.stop
    fixed = {"rtol": 0.0, "atol": 0.0, "check_every": 1}
    return replace(stop, max_steps=sweep.steps, **fixed) if isinstance(sweep, Lockstep) else stop


def _check_options(flags: dict[str, bool], functions: dict[str, Any]) -> None:
    for name, flag in flags.items():
        check_flag(name, flag)
    for name, function in functions.items():
        if function is not None:
            check_callable(name, function)
    if flags["return_cache"] and flags["return_uncommitted"]:
        raise ValueError("return_uncommitted=True commits later: leave return_cache out")


def _check_injection(inputs: Any, backbone: Backbone[Any]) -> None:
    if isinstance(inputs, Inputs) and inputs.injection is None:
        raise ValueError(
            f"this {type(backbone).__name__} was built without an injection, so from zero or a random start its fixed "
            "point does not depend on the input: build it with injection=True, wrap it as "
            'dq.Injected(backbone, dq.AddInjection()), or take start="input" or an ExplicitModel'
        )


def _check_sharded(gradient: Gradient | None, stop: Stop) -> None:
    """Raise an error if processes could take different numbers of backward steps: sharded, they would deadlock."""
    unrolled = isinstance(gradient, (Unrolled, Reversible))
    own = gradient.stop if isinstance(gradient, Implicit) else stop if unrolled else None
    if own is not None and own.check_every < own.max_steps:
        raise ValueError(
            f"{type(gradient).__name__} with {own} can take a different number of backward steps in each process, "
            "which deadlocks a sharded backbone: use Phantom, OneStep or Stop.exactly(n)"
        )
