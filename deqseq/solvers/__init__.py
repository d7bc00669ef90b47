"""Fixed-point algorithms."""

from deqseq.solvers.adaptive import Adaptive
from deqseq.solvers.anderson import Anderson
from deqseq.solvers.base import ExternalSolver, Solver
from deqseq.solvers.broyden import Broyden
from deqseq.solvers.relaxed import Naive, Relaxed

__all__ = ["Adaptive", "Anderson", "Broyden", "ExternalSolver", "Naive", "Relaxed", "Solver"]
