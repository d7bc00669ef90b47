"""Implicit (deep equilibrium) sequence models: solve and differentiate fixed points of sequence
blocks.
"""

import torch

from deqseq import backbones, gradients, models, solvers
from deqseq.backbones import *
from deqseq.config import SolveConfig
from deqseq.fixed_point import fixed_point
from deqseq.gradients import *
from deqseq.models import *
from deqseq.rows import take
from deqseq.solution import ConvergenceError, ConvergenceWarning, Solution, SolveStats, Status
from deqseq.solve import Problem, solve
from deqseq.solvers import *
from deqseq.start import RandomStart, Start
from deqseq.step import Progress
from deqseq.stop import Rule, Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.types import FixedPointMap, Residual, State

__version__ = "0.2.0"

# glibc gives free memory back to the system above a limit: twice the largest block that was freed.
# Freeing this one, whose pages are never touched, sets the limit to 64 MiB. Without it, a solve of
# some MiB on a CPU may ask for the same pages in every iteration, which took a third of its time.
torch.empty((1 << 25) - (1 << 12), dtype=torch.uint8, device="cpu")

__all__ = [
    "FixedPointMap",
    "Problem",
    "Progress",
    "RandomStart",
    "Residual",
    "Rule",
    "SolveConfig",
    "Start",
    "State",
    "Status",
]
__all__ += [
    "ConvergenceError",
    "ConvergenceWarning",
    "Solution",
    "SolveStats",
    "Stop",
    "fixed_point",
    "solve",
    "take",
]
__all__ += ["Chunked", "Sequential", "Simultaneous", "Sliding", "Sweep"]
__all__ += backbones.__all__
__all__ += gradients.__all__
__all__ += models.__all__
__all__ += solvers.__all__
