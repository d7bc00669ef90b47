"""Test suites to inherit when you write a solver or a backbone."""

from importlib.util import find_spec

if find_spec("pytest"):  # pytest shows the values of an assert only in modules that it rewrites
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.backbones", f"{__name__}.solvers")

from deqseq.testing.backbones import BackboneContract
from deqseq.testing.solvers import SolverContract

__all__ = ["BackboneContract", "SolverContract"]
