"""Reports on a model: does it converge, contract and iterate, and are its gradients good?"""

from deqseq.diagnostics.collapse import Collapse, check_collapse
from deqseq.diagnostics.duality import DualityReport, SweepReport, check_duality
from deqseq.diagnostics.effort import TokenEffort, token_effort
from deqseq.diagnostics.explain import Explanation, explain
from deqseq.diagnostics.figures import Drawable
from deqseq.diagnostics.gradient_bias import EstimatorBias, GradientBias, gradient_bias
from deqseq.diagnostics.report import Report, report
from deqseq.diagnostics.residuals import ResidualTrace, residual_trace
from deqseq.diagnostics.spectral import SpectralRadius, model_spectral_radius, spectral_radius

__all__ = [
    "Collapse",
    "Drawable",
    "DualityReport",
    "EstimatorBias",
    "Explanation",
    "GradientBias",
    "Report",
    "ResidualTrace",
    "SpectralRadius",
    "SweepReport",
    "TokenEffort",
    "check_collapse",
    "check_duality",
    "explain",
    "gradient_bias",
    "model_spectral_radius",
    "report",
    "residual_trace",
    "spectral_radius",
    "token_effort",
]
