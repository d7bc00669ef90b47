"""Reports on a model: why solves fail, how far the map contracts, and whether all sweeps agree."""

from deqseq.diagnostics.explain import Explanation, explain
from deqseq.diagnostics.reports import (
    Depth,
    DualityReport,
    ExtrapolationReport,
    SweepReport,
    check_duality,
    extrapolation,
)
from deqseq.diagnostics.spectral import SpectralRadius, model_spectral_radius, spectral_radius

__all__ = [
    "Depth",
    "DualityReport",
    "Explanation",
    "ExtrapolationReport",
    "SpectralRadius",
    "SweepReport",
    "check_duality",
    "explain",
    "extrapolation",
    "model_spectral_radius",
    "spectral_radius",
]
