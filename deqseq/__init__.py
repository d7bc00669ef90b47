"""Implicit (deep equilibrium) sequence models: solve and differentiate fixed points of sequence blocks."""

from deqseq.fixed_point import fixed_point
from deqseq.gradients import AttachedGradient, Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.solution import ConvergenceError, ConvergenceWarning, Solution, SolveStats, Status
from deqseq.solve import Progress, solve
from deqseq.solvers import Anderson, Broyden, Naive, OutsideSolver, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, Residual, SelectableMap, State

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "AttachedGradient",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "FixedPointMap",
    "Gradient",
    "Implicit",
    "Naive",
    "OneStep",
    "OutsideSolver",
    "Phantom",
    "Progress",
    "Relaxed",
    "Residual",
    "SelectableMap",
    "Solution",
    "SolveStats",
    "Solver",
    "State",
    "Status",
    "Stop",
    "Unrolled",
    "fixed_point",
    "solve",
]
