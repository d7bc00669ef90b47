"""When a solve ends: tolerances, budget and granularity."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from deqseq.check import check_choice, check_integer, check_number, check_type
from deqseq.exits import ExitRule

Granularity = Literal["batch", "row", "token"]
Norm = Literal["max_token", "frobenius"]
Quantity = Literal["residual", "error"]


@dataclass(frozen=True)
class Stop:
    r"""The stopping rule of a solve.

    With :math:`d = \lVert f(z) - z \rVert` and :math:`s = \lVert f(z) \rVert`, a token has converged when

    .. math:: d \le \mathrm{atol} + \mathrm{rtol} \cdot s,

    and its residual is :math:`d / s`. The paper divides by the norm of the previous iterate; ours is the norm of
    the value that is returned, which is defined for a start at zero too.

    Args:
        rtol: relative tolerance, at least 0.
        atol: absolute tolerance, at least 0, in the units of the state.
        max_steps: the budget: how many times the map may be evaluated, at least 1.
        per: what converges on its own. ``"row"``: a row ends when it has converged. ``"token"``: in addition,
            converged tokens are frozen until their residual rises above the tolerance again; a row ends when all its
            tokens pass in one evaluation. ``"batch"``: all rows end together.
        norm: the residual of a row, ``"max_token"``: the largest over its tokens (norms over the last dimension);
            ``"frobenius"``: one norm over the whole row. A whole-sequence norm stops too early on long sequences,
            where the few tokens that still move weigh little.
        check_every: evaluations between two checks of the residual, at least 1. A check copies one flag per row to
            the host, which on CUDA synchronises; between checks nothing is measured, ended or recorded.
        divergence: a row has diverged when its :math:`d` exceeds this multiple of the scale it started from (the
            larger of 1 and the first :math:`d` and :math:`s`), or is not finite.
        of: what the tolerances are of. ``"residual"``: :math:`d`, as above. ``"error"``: :math:`d / (1 - q)`, where
            :math:`q` is the ratio of the last two residuals; see ``error`` of :class:`SolveStats`. A map that converges
            slowly is then solved to a smaller residual, in more iterations; where the residual does not fall, nothing
            passes.
        exit: a rule that ends tokens earlier, such as :class:`StableArgmax`, asked at every check. A row that ends by
            it has the status ``EXITED``, not ``CONVERGED``; that is no failure. Needs :class:`Simultaneous` or
            :class:`Lockstep`. Default: the residual alone.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a number out of its range; ``per="token"`` with the Frobenius norm; an exit rule with that norm or
            with a tolerance of the error.

    Example:
        >>> Stop(rtol=1e-5, max_steps=200).per
        'row'
        >>> Stop.exactly(8).max_steps
        8
    """

    rtol: float = 1e-3
    atol: float = 0.0
    max_steps: int = 64
    per: Granularity = "row"
    norm: Norm = "max_token"
    check_every: int = 1
    divergence: float = 1e4
    of: Quantity = "residual"
    exit: ExitRule | None = None

    def __post_init__(self) -> None:
        check_number("Stop.rtol", self.rtol, "[0, inf)")
        check_number("Stop.atol", self.atol, "[0, inf)")
        check_integer("Stop.max_steps", self.max_steps, 1)
        check_choice("Stop.per", self.per, get_args(Granularity))
        check_choice("Stop.norm", self.norm, get_args(Norm))
        check_integer("Stop.check_every", self.check_every, 1)
        check_number("Stop.divergence", self.divergence, "(1, inf]")
        check_choice("Stop.of", self.of, get_args(Quantity))
        check_type("Stop.exit", self.exit, (ExitRule, type(None)), "dq.StableArgmax(2)")
        if self.norm == "frobenius" and (self.per == "token" or self.exit is not None):
            which = 'Stop.per="token"' if self.exit is None else "Stop.exit"
            raise ValueError(f'{which} measures each token: Stop.norm must be "max_token", got "frobenius"')
        if self.of == "error" and self.exit is not None:
            raise ValueError('Stop.exit goes with a tolerance of the residual: Stop.of must be "residual", got "error"')

    @classmethod
    def exactly(cls, steps: int) -> "Stop":
        """Run ``steps`` evaluations whatever the residual, check it once at the end, and return the last value.

        Rows have the status ``MAX_STEPS_REACHED``, unless their residual is exactly 0.

        Args:
            steps: evaluations, at least 1.

        Returns:
            A rule with zero tolerance that is checked at the last evaluation.
        """
        check_integer("steps", steps, 1)
        return cls(rtol=0.0, atol=0.0, max_steps=steps, check_every=steps)

    def checks(self, step: Any) -> Any:
        """Whether the residual is measured after evaluation ``step``, counted from 1; also for an array of them."""
        return (step % self.check_every == 0) | (step == self.max_steps)
