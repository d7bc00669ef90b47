"""Reports on a model: why solves fail, how far the map contracts, and whether all sweeps agree."""

from deqseq.diagnostics.duality import DualityReport, SweepReport, check_duality
from deqseq.diagnostics.explain import Explanation, explain
from deqseq.diagnostics.spectral import SpectralRadius, model_spectral_radius, spectral_radius

__all__ = [
    "DualityReport",
    "Explanation",
    "SpectralRadius",
    "SweepReport",
    "check_duality",
    "explain",
    "model_spectral_radius",
    "spectral_radius",
]
