"""Gradient estimators."""

from deqseq.gradients.base import AttachedGradient, Gradient
from deqseq.gradients.implicit import Implicit
from deqseq.gradients.unrolled import OneStep, Phantom, Unrolled

__all__ = ["AttachedGradient", "Gradient", "Implicit", "OneStep", "Phantom", "Unrolled"]
