"""A backbone iterated to its fixed point."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from deqseq.arguments import PositiveInt, check_type, checked
from deqseq.backbones.base import Cache, GivenBackbone
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.layers import with_weights
from deqseq.models.base import BackboneModel, Uncommitted, check_input, check_loaded
from deqseq.models.eval_mode import in_mode, same_randomness
from deqseq.models.output import Evaluation, ModelOutput
from deqseq.models.padding import Padding
from deqseq.solution import Call, Outcome, Solution, Status, warn_failed
from deqseq.solve import Problem
from deqseq.start import Start, check_states, initial_state
from deqseq.step import Callback, autocast_dtype, check_start, evaluate, in_autocast
from deqseq.stop import Stop
from deqseq.tokens import TokenArgs, check_commits, keeps_cache, token_map
from deqseq.types import Mask, Sequence, State, Step


@dataclass
class SolveSettings:
    """Where an :class:`ImplicitModel` reads how it is solved; models of transformers put their
    configuration here.
    """

    solve: SolveConfig
    eval_solve: SolveConfig | None


@dataclass(frozen=True, kw_only=True)
class ModelCall(Call):
    """A call of an :class:`ImplicitModel`, which is made again with its weights of then.

    It keeps the embedded tokens, not what was prepared from them, and no copies of weights.
    """

    model: "ImplicitModel"
    x: Sequence
    mask: Mask | None
    cache: Cache | None
    start: State | None
    solve: SolveConfig
    value: State
    training: bool
    autocast: torch.dtype | None

    def repeat(
        self,
        *,
        start: State | None = None,
        callback: Callback | None = None,
        with_graph: bool = False,
        **changes: Any,
    ) -> ModelOutput:
        model, x, start = self.model, self.x, self.start if start is None else start
        dtype = next((parameter.dtype for parameter in model.parameters()), x.dtype)
        if dtype != x.dtype:
            raise ValueError(
                f"explain() solves again with the model as it is now: {dtype}; the solve was in "
                f"{x.dtype}"
            )
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                "explain() solves again with the model as it is now: its weights are on meta"
            )
        fields: SolveFields = {} if start is None else {"start": start}
        solve = replace(self.solve, **changes)
        # each solve draws the same dropout masks and random starts, or the maps would differ
        with (
            model.without_warnings(),
            in_mode(model, training=self.training),
            same_randomness(x.device),
            torch.set_grad_enabled(with_graph),
            in_autocast(x.device, self.autocast),
        ):
            return model(
                x, mask=self.mask, cache=self.cache, callback=callback, solve=solve, **fields
            )

    @property
    def takes_windows(self) -> bool:
        return super().takes_windows and keeps_cache(self.model.backbone)

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.value.dtype

    def values(self, outcome: Outcome) -> tuple[State, State | None]:
        estimated = self.repeat(with_graph=True).value.detach() if self.training else None
        return self.value, estimated


class ImplicitModel(BackboneModel):
    r"""The fixed point of a backbone as a function of its input, :math:`z^* = f_\theta(z^*, x)`.

    If a solve converges and there is only one fixed point, solver, sweep and start do not change
    the result beyond the tolerance. They do if there are several fixed points, or if the budget is
    too small.

    Args:
        backbone: the layers, as a map of the state.
        solve: how its fixed point is found and differentiated. Default: :class:`SolveConfig`'s
            defaults.
        eval_solve: the same in eval mode. Default: ``solve``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a backbone with a batch norm, which makes rows depend on one another.

    References:
        Schöne et al., Implicit Language Models are RNNs: Balancing Parallelization and
        Expressivity, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(
        ...     dq.Affine(4), dq.SolveConfig(solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6))
        ... )
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x, throw=True).value, model.backbone.solution(x), atol=1e-5)
        True
        >>> output = model(x, sweep=dq.Sequential())  # any field can be replaced for one call
        >>> output.stats.iterations.shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(
        self,
        backbone: GivenBackbone,
        solve: SolveConfig = SolveConfig(),
        eval_solve: SolveConfig | None = None,
    ) -> None:
        super().__init__(backbone)
        for name, module in backbone.named_modules():
            if isinstance(module, _BatchNorm):
                raise ValueError(
                    f"backbone must treat each row on its own, got {type(module).__name__} as "
                    f"{name!r}: take RMSNorm or LayerNorm"
                )
        self.solves: Any = SolveSettings(solve, eval_solve)
        # modes in which it has warned; one list for all copies that with_weights makes
        self._warned: list[bool] = []

    @checked
    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        callback: Callback | None = None,
        throw: bool = False,
        solve: SolveConfig | None = None,
        **fields: Unpack[SolveFields],
    ) -> ModelOutput:
        """Solve for the fixed point that belongs to the input ``x``.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: bool, True at real tokens, ``(batch, length)``. Padding may be anywhere in a row.
                It does not change the real tokens, and is zero in the result. Default: no padding.
            cache: the ``cache`` of the :class:`ModelOutput` for the tokens before. Default: there
                are none.
            return_cache: whether to return the cache after these tokens, which carries no gradient.
            callback: called with a :class:`Progress` at every check of the residual. The residuals
                of real tokens come first in each row, wherever the padding is.
            throw: whether rows that spent their budget or diverged raise an error.
            solve: replaces the model's configuration for this call.
            **fields: fields of :class:`SolveConfig` to replace for this call: ``solver``, ``stop``,
                ``gradient``, ``sweep``, ``start``. ``start`` may also be the states to begin from,
                ``(batch, length, state_width)``.

        Returns:
            The states, with the numbers of their solve. In training mode, with gradients enabled,
            the value is the estimator's, such as that after the phantom steps. Otherwise it is the
            value of the solve.

        Warns:
            ConvergenceWarning: in eval mode, a row spent its budget or diverged; in training mode,
                a row diverged or none converged, unless ``stop.check_every`` is at least
                ``stop.max_steps``. Never without a tolerance. Once per model and mode.

        Raises:
            ConvergenceError: with ``throw``, names the rows that failed, their residuals and a
                remedy.
            TypeError: an unknown keyword, or a value of the wrong type.
            NotImplementedError: a cache, or a sweep other than :class:`Simultaneous`, with a
                backbone that is not causal or has no ``advance``.
            ValueError: a bad shape; offloaded weights; :class:`Unrolled` with another sweep than
                :class:`Simultaneous`; a solver of another library with a window.
        """
        start = fields.get("start")
        states = start if isinstance(start, Tensor) else None
        if states is not None:
            del fields["start"]
            check_start("start", states)
        config = resolve(self.solve_config, solve, fields)
        swept = config.sweep.block is not None
        check_loaded(self.backbone, x)
        self._check(x, states, return_cache or cache is not None or swept)
        self._check_backbone(x[:, :64] if swept else x)  # a sweep may not have room for all tokens
        padding, needs_grad = Padding.of(x, mask), self._requires_gradient(x, states)
        with torch.set_grad_enabled(needs_grad):
            backbone, compact = with_weights(self.backbone), padding.compact(x)
            tokens = TokenArgs.prepared(backbone, compact, cache, padding.mask, return_cache)
            if states is None:
                _check_injection(tokens, config)
            z0 = self._start_states(compact, states, padding, config.start)
            problem = Problem(
                f=token_map,
                z0=z0 if config.gradient.reaches_start else z0.detach(),
                args=tokens,
                has_aux=True,
                solver=config.solver,
                stop=config.stop,
                sweep=config.sweep,
                callback=callback,
                returns_tested=config.solver.combines,
            )
            solution = config.gradient.apply(problem, keep_value=not self.training)
            check_type(f"what {type(config.gradient).__name__}.apply returns", solution, Solution)
            solution = padding.restored(tokens.per_token(solution))
        call = ModelCall(
            model=self,
            x=x.detach(),
            mask=mask,
            cache=cache,
            start=states,
            solve=config,
            solver=config.solver,
            stop=config.stop,
            sweep=config.sweep,
            value=solution.value.detach(),
            training=self.training,
            autocast=autocast_dtype(x.device),
        )
        output = ModelOutput(solution.value, solution.aux, solution.stats, solution.status, call)
        if throw:
            return output.raise_if_failed()
        self.warn_once(solution.ends, config.stop)
        return output

    @checked
    @torch.no_grad()
    def evaluate(
        self,
        x: Sequence,
        cache: Cache | None = None,
        start: Start | Sequence | None = None,
        iterations: PositiveInt = 1,
        step: Step | None = None,
    ) -> Evaluation:
        states = start if isinstance(start, Tensor) else None
        config = self.solve_config
        if start is not None and states is None:
            config = replace(config, start=start)
        self._check(x, states, commits=True)
        backbone = with_weights(self.backbone) if iterations > 1 else self.backbone
        tokens = TokenArgs.prepared(backbone, x, cache, None, True)
        if states is None:
            _check_injection(tokens, config)
        z = self._start_states(x, states, Padding(), config.start)
        point, (states, aux) = z, evaluate(token_map, z, tokens, has_aux=True)
        for _ in range(iterations - 1):
            point = states if step is None else step(point, states)
            states, aux = evaluate(token_map, point, tokens, has_aux=True)
        return Evaluation(point, states, states, Uncommitted(self.backbone, cache, aux))

    @property
    def solve(self) -> SolveConfig:
        """How the fixed point is found and differentiated; can be set."""
        return self.solves.solve

    @solve.setter
    def solve(self, solve: Any) -> None:
        check_type("solve", solve, SolveConfig)
        self.solves.solve = solve

    @property
    def eval_solve(self) -> SolveConfig | None:
        """The same in eval mode; None: as :attr:`solve`. Can be set."""
        return self.solves.eval_solve

    @eval_solve.setter
    def eval_solve(self, eval_solve: Any) -> None:
        check_type("eval_solve", eval_solve, (SolveConfig, type(None)))
        self.solves.eval_solve = eval_solve

    @property
    def solve_config(self) -> SolveConfig:
        """The configuration in the current mode: ``eval_solve`` in eval mode if there is one, else
        ``solve``.
        """
        return self.solve if self.training or self.eval_solve is None else self.eval_solve

    def _check(self, x: Sequence, start: Tensor | None, commits: bool) -> None:
        check_input(x, self.backbone)
        if start is not None:
            check_states(start, wide(x, self.backbone.state_width))
        if commits:
            check_commits(self.backbone)

    def _start_states(
        self, tokens: Sequence, states: Tensor | None, padding: Padding, start: Start
    ) -> Tensor:
        """Where the iteration begins, real tokens first: at given ``states``, or at ``start``."""
        if states is not None:
            return padding.compact(states)
        width = self.backbone.state_width
        if start == "input" and width != self.d_model:
            raise ValueError(
                f'start must not be "input" where the state is wider ({width}) than the input '
                f"({self.d_model}): begin at zero, random states, or states of your own"
            )
        states = initial_state(start, wide(tokens, width))
        if start == "zero":
            return states
        if padding.mask is not None:
            states = states.masked_fill(~padding.mask[..., None], 0)
        return states.nan_to_num(0.0, 0.0, 0.0)  # a row that is not finite diverges on its own

    @contextmanager
    def without_warnings(self) -> Iterator[None]:
        """Solves in this block do not warn, and are not counted as the first that failed."""
        warned, self._warned = self._warned, [True, False]
        try:
            yield
        finally:
            self._warned = warned

    def warn_once(self, ends: np.ndarray, stop: Stop) -> None:
        """Warn of the first solve in this mode whose rows failed; ``ends`` is their status.

        The warning names the budget of ``stop``. In training a row must have diverged, or all must
        have failed, and no warning is given unless some could converge.
        """
        training = self.training
        # a phase of a fixed number of iterations reports its residual, and need not converge
        if training not in self._warned and not (training and stop.runs_to_the_end):
            later = " (Later calls of this model in this mode do not warn.)"
            least = len(ends) if training and (ends != Status.DIVERGED).all() else 1
            if warn_failed(ends, stop, least, later):
                self._warned.append(training)

    def _requires_gradient(self, *tensors: Tensor | None) -> bool:
        if not torch.is_grad_enabled():
            return False
        inputs = [x for x in tensors if x is not None]
        return any(x.requires_grad for x in (*inputs, *self.parameters()))


def wide(x: Sequence, width: int) -> Tensor:
    """Embedded tokens, or what has their dtype and device and the width of the state."""
    return x if x.shape[2] == width else x.new_zeros(()).expand(*x.shape[:2], width)


def _check_injection(tokens: TokenArgs, config: SolveConfig) -> None:
    if config.start != "input" and not tokens.backbone.sees_input(tokens.inputs):
        raise ValueError(
            f"this {type(tokens.backbone).__name__} was built without an injection, so from zero "
            "or a random start its fixed point does not depend on the input: build it with "
            "injection=True, wrap it as dq.Injected(backbone, dq.AddInjection()), or take "
            'start="input" or an ExplicitModel'
        )
