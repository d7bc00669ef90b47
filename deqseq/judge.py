"""Applying an exit rule during a solve."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from deqseq.exits import Done
from deqseq.norms import measure
from deqseq.rows import take
from deqseq.stop import Stop
from deqseq.types import RowIndex, State


class Judge:
    """Asks the exit rule of ``stop``, and keeps its memory for the rows that are computed."""

    def __init__(self, stop: Stop, readout: Callable[..., Tensor] | None) -> None:
        self._stop, self._readout, self._memory = stop, readout, None

    def passed(self, z: State, fz: State, args: Any = None) -> Bool[Tensor, "rows *tokens"]:
        """What passes, in the shape of a measurement, where a token does by its residual or by the rule."""
        passed = measure(z, fz, replace(self._stop, per="token")).passed
        passed = passed | self.done(fz, passed.shape[1], args)
        if self._stop.per == "token":
            return passed
        return passed.all(dim=1) if self._stop.per == "row" else passed.all().expand(len(passed))

    @torch.no_grad()
    def done(self, fz: State, tokens: int, args: Any = None) -> Done:
        """Which ``tokens`` of each row the rule lets go."""
        rule, states, shape, logits = self._stop.exit, fz.detach(), (len(fz), tokens), None
        assert rule is not None
        if rule.needs_logits:
            assert self._readout is not None
            logits = self._readout(states) if args is None else self._readout(states, args)
            if not isinstance(logits, Tensor) or not logits.is_floating_point():
                got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
                raise TypeError(f"readout must give logits, a floating-point tensor, got {got}")
            if logits.ndim < 2 or not logits.shape[-1] or logits.shape[:-1].numel() != shape[0] * shape[1]:
                raise ValueError(
                    f"readout must give logits for each token of the states {tuple(states.shape)}, "
                    f"{(*shape, 'classes')}, got {tuple(logits.shape)}"
                )
            logits = logits.reshape(*shape, -1)
        pair = rule.step(states, logits, self._memory)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{type(rule).__name__}.step must return a pair (done, memory), got {type(pair).__name__}")
        done, self._memory = pair
        if not isinstance(done, Tensor) or done.dtype != torch.bool or done.shape != shape:
            got = f"{done.dtype} {tuple(done.shape)}" if isinstance(done, Tensor) else type(done).__name__
            raise ValueError(f"{type(rule).__name__}.step must return bool {shape}, got {got}")
        return done

    def keep(self, rows: RowIndex) -> None:
        """Remove all rows but these."""
        self._memory = take(self._memory, rows)
