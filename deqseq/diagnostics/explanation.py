"""What :func:`deqseq.diagnostics.explain` finds: causes, what to do about each, and how
they print.
"""

from dataclasses import dataclass

ADVICE = {
    "budget": "give more iterations",
    "no tolerance": "without a tolerance no row can converge: give stop=Stop(rtol=1e-3)",
    "slow convergence": (
        "give more iterations, or take a solver that uses several past iterates, or train first"
    ),
    "limit cycle": "damp the iteration",
    "divergence": "the map expands: damp the iteration, or make the map contractive",
    "loose tolerance": "tighten it",
    "estimator": "in eval mode the value is that of the solve; to train, take fewer or "
    "shorter steps, or make the map "
    "contract",
    "changed since": (
        "explain a solve before weights, mode or inputs change: it is made again with those of now"
    ),
    "drift": "the map has no fixed point near: normalise its output, or make it contract",
    "fixed point zero": "give an absolute tolerance, such as stop=Stop(atol=1e-6)",
    "random map": "draw noise and dropout once, before the solve, or call eval()",
    "map not finite": "look for NaN in the inputs and the weights",
    "precision": "loosen the tolerance, or compute in a wider dtype",
    "no fixed point found": "make the map contract, for example by scaling its weights "
    "to a spectral norm below 1, or "
    "train the model at its fixed point (deqseq.training.free); an untrained map, one trained "
    "through unrolled "
    "iterations alone, or inputs unlike those of training need not have a fixed point that a "
    "solver reaches",
    "several fixed points": "the start decides which one is found: solve from the "
    "start that training used, and "
    "train with every sweep that will be used",
}
"""What to do about each cause; a row that converged has the cause "converged"."""


@dataclass(frozen=True)
class Explanation:
    """Why rows converged or not, and what to do; prints as text.

    Attributes:
        causes: one per row, such as "converged" or "budget".
        findings: what was observed of the rows of each cause.
        remedies: what to do about each; a setting that was tried and converged is named.
    """

    causes: tuple[str, ...]
    findings: dict[str, str]
    remedies: dict[str, str]

    def __str__(self) -> str:
        lines = []
        for cause, finding in self.findings.items():
            rows, batch = (
                [row for row, each in enumerate(self.causes) if each == cause],
                len(self.causes),
            )
            shown = (
                f"row{'s' * (len(rows) > 1)} "
                f"{', '.join(map(str, rows[:8]))}{' …' * (len(rows) > 8)} of {batch}"
            )
            if len(rows) == batch:
                shown = f"all {batch} rows" if batch > 1 else "row 0"
            lines.append(f"{shown}: {cause}. {finding}")
            if cause in self.remedies:
                lines.append(f"  Remedy: {self.remedies[cause]}.")
        return "\n".join(lines)
