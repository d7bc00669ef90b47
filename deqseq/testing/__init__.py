"""Test suites to inherit when you write a solver or a backbone."""

from importlib.util import find_spec

if find_spec(
    "pytest"
):  # its rewritten asserts show their values; any other runner takes the suites as they are
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.backbones", f"{__name__}.solvers")

from deqseq.testing.backbones import BackboneContract
from deqseq.testing.solvers import SolverContract

__all__ = ["BackboneContract", "SolverContract"]
