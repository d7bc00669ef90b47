"""Plain and damped iteration; that each step is ``z + damping (f(z) - z)`` is held by
``test_solve_properties.py``.
"""

from deqseq import Naive, Relaxed
from deqseq.testing import SolverContract


class TestNaive(SolverContract):
    solver = Naive()


class TestRelaxed(SolverContract):
    solver = Relaxed(0.7)
