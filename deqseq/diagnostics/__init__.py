"""Does a model do what it should? Reports and checks."""

from deqseq.diagnostics.duality import DualityReport, PairReport, SweepReport, check_duality

__all__ = ["DualityReport", "PairReport", "SweepReport", "check_duality"]
