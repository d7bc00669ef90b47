"""Test suites to inherit when you write a solver, a gradient estimator, a sweep or a backbone."""

try:
    import pytest
except ImportError as error:
    raise ImportError('deqseq.testing needs pytest: pip install "deqseq[test]"') from error

_SUITES = ("backbones", "gradient_graphs", "gradients", "solvers", "sweeps")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _SUITES))  # asserts then show their values

from deqseq.testing.backbones import BackboneContract  # noqa: E402
from deqseq.testing.gradients import GradientContract  # noqa: E402
from deqseq.testing.solvers import SolverContract  # noqa: E402
from deqseq.testing.sweeps import SweepContract  # noqa: E402

__all__ = ["BackboneContract", "GradientContract", "SolverContract", "SweepContract"]
