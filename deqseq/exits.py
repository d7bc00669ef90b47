"""Rules that end tokens before their residual passes: by what the head, or a gate, makes of their states."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.check import check_callable, check_integer, check_number
from deqseq.types import State

Logits = Float[Tensor, "rows tokens classes"]
Done = Bool[Tensor, "rows tokens"]


class ExitRule(ABC):
    """When a token may end although its residual has not passed: the ``exit`` of a :class:`Stop`.

    A rule object is its configuration: a frozen dataclass. It is asked at every check of the residual, about the values
    that the map has just returned.

    Example:
        Exit where the entropy of the prediction is small.

        >>> import deqseq as dq
        >>> @dataclass(frozen=True)
        ... class Entropy(ExitRule):
        ...     threshold: float
        ...     def step(self, states, logits, memory):
        ...         p = logits.softmax(-1)
        ...         return -(p * p.log()).sum(-1) <= self.threshold, None
        >>> lm = dq.load_example("parity")
        >>> output = lm(torch.tensor([[1, 0, 1, 1]]), stop=dq.Stop(rtol=1e-6, exit=Entropy(0.1)))
        >>> dq.Status(int(output.status[0])).name
        'EXITED'
    """

    needs_logits: ClassVar[bool] = True
    """Whether the rule judges logits; one that judges states alone needs no head."""

    @abstractmethod
    def step(self, states: State, logits: Logits | None, memory: Any) -> tuple[Done, Any]:
        """Judge one evaluation.

        Args:
            states: the map's values in the rows that are still computed, ``(rows, *event)``.
            logits: the head of these, ``(rows, tokens, classes)``; None if the rule needs none.
            memory: what the last call returned; None at the first check of a solve.

        Returns:
            Which tokens may end now, bool, ``(rows, tokens)``; and what the next call needs: a tensor with these rows,
            a record of such tensors, or None.
        """


@dataclass(frozen=True)
class LogitKL(ExitRule):
    r"""Exit where the prediction no longer changes: :math:`\mathrm{KL}(p_{t-1} \,\Vert\, p_t)` is below a threshold.

    The predictions of the last check are kept, ``(rows, tokens, classes)``.

    Args:
        threshold: in nats, above 0.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, 2025, arXiv 2502.05171, whose
        threshold is 5e-4.

    Example:
        >>> import deqseq as dq
        >>> lm, ids = dq.load_example("parity"), torch.tensor([[1, 0, 1, 1]])
        >>> exited, solved = (lm(ids, stop=dq.Stop(rtol=1e-6, exit=rule)) for rule in (LogitKL(), None))
        >>> bool(exited.stats.iterations < solved.stats.iterations)
        True
    """

    threshold: float = 5e-4

    def __post_init__(self) -> None:
        check_number("LogitKL.threshold", self.threshold, "(0, inf)")

    def step(self, states: State, logits: Logits | None, memory: Any) -> tuple[Done, Logits]:
        now = _wide(logits).log_softmax(dim=-1)
        if memory is None:
            return torch.zeros(now.shape[:2], dtype=torch.bool, device=now.device), now
        each = F.kl_div(now, memory, reduction="none", log_target=True)
        each = torch.where(memory == -torch.inf, 0, each)  # a class that the head rules out
        return each.sum(dim=-1) < self.threshold, now


class Argmax(NamedTuple):
    """The predicted token at the last check, and for how many checks it has been that, ``(rows, tokens)`` each."""

    token: Int64[Tensor, "rows tokens"]
    times: Int64[Tensor, "rows tokens"]


@dataclass(frozen=True)
class StableArgmax(ExitRule):
    """Exit where several checks in a row predict the same token.

    Args:
        times: how many, at least 2.

    Example:
        >>> import deqseq as dq
        >>> lm, ids = dq.load_example("parity"), torch.tensor([[1, 0, 1, 1]])
        >>> output = lm(ids, stop=dq.Stop(rtol=1e-6, exit=StableArgmax(3)))
        >>> output.logits.argmax(-1), bool(output.converged)      # right: the parity so far
        (tensor([[1, 1, 0, 1]]), False)
    """

    times: int = 2

    def __post_init__(self) -> None:
        check_integer("StableArgmax.times", self.times, 2)

    def step(self, states: State, logits: Logits | None, memory: Argmax | None) -> tuple[Done, Argmax]:
        best, token = _wide(logits).max(dim=-1)
        times = torch.ones_like(token)
        if memory is not None:
            times = torch.where(token == memory.token, memory.times + 1, times)
        times = torch.where(best.isfinite(), times, 0)  # NaN is no prediction
        return times >= self.times, Argmax(token, times)


@dataclass(frozen=True)
class Margin(ExitRule):
    """Exit where the most probable token is ahead of the second one by a margin of probability.

    Args:
        threshold: the difference of the two probabilities, in (0, 1].

    References:
        Schuster et al., Confident Adaptive Language Modeling, NeurIPS 2022, arXiv 2207.07061, the softmax response.

    Example:
        >>> import deqseq as dq
        >>> lm, ids = dq.load_example("parity"), torch.tensor([[1, 0, 1, 1]])
        >>> lm(ids, stop=dq.Stop(rtol=1e-6, exit=Margin(0.9))).logits.argmax(-1)
        tensor([[1, 1, 0, 1]])
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        check_number("Margin.threshold", self.threshold, "(0, 1]")

    def step(self, states: State, logits: Logits | None, memory: None) -> tuple[Done, None]:
        probability = _wide(logits).softmax(dim=-1)
        best = probability.topk(min(2, probability.shape[-1]), dim=-1).values
        return best[..., 0] - best[..., 1:].sum(dim=-1) >= self.threshold, None


@dataclass(frozen=True)
class ExitGate(ExitRule):
    r"""Exit where a learned gate says so: its probabilities of exiting add up to a threshold, as in Ouro.

    .. math:: \lambda_t = \sigma(\mathrm{gate}(h_t)), \qquad 1 - \prod_{j \le t} (1 - \lambda_j) \ge \mathrm{threshold}

    It counts checks, so it belongs to :class:`Lockstep` or to a solve that checks every evaluation.

    Args:
        gate: maps states ``(..., d_model)`` to a number before the sigmoid, ``(..., 1)``, such as an Ouro's
            ``lm.exit_gate``.
        threshold: in (0, 1]; at 1 nothing exits.

    References:
        Zhu et al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> import deqseq as dq
        >>> gate, model = torch.nn.Linear(4, 1), dq.ImplicitModel(dq.Affine(4))
        >>> output = model(torch.ones(2, 3, 4), sweep=dq.Lockstep(6), stop=dq.Stop(exit=ExitGate(gate, 0.8)))
        >>> output.stats.iterations.shape       # of each token
        torch.Size([2, 3])
    """

    gate: Callable[[Tensor], Tensor]
    threshold: float = 0.5

    needs_logits = False

    def __post_init__(self) -> None:
        check_callable("ExitGate.gate", self.gate)
        check_number("ExitGate.threshold", self.threshold, "(0, 1]")

    def step(self, states: State, logits: Logits | None, memory: Any) -> tuple[Done, Tensor]:
        """``memory``: the probability that a token has not exited yet, ``(rows, tokens)``."""
        stays = torch.sigmoid(-_wide(self.gate(states))).flatten(1)
        stays = stays if memory is None else memory * stays
        done = stays <= 1 - self.threshold
        return done & bool(self.threshold < 1), stays  # a probability can underflow


def check_exit(rule: ExitRule | None, readout: object) -> None:
    """Refuse a rule that judges logits where there is no head."""
    if rule is not None and rule.needs_logits and readout is None:
        raise ValueError(
            f"Stop.exit={rule} judges logits, and there is no head here: call the model through a CausalLM, or pass "
            "head=... to a model and readout=... to dq.solve"
        )


def _wide(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.to(torch.promote_types(x.dtype, torch.float32))
