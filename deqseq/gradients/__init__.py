"""Gradient estimators."""

from deqseq.gradients.base import AttachedGradient, Gradient
from deqseq.gradients.implicit import Implicit
from deqseq.gradients.phantom import OneStep, Phantom
from deqseq.gradients.unrolled import Unrolled

__all__ = ["AttachedGradient", "Gradient", "Implicit", "OneStep", "Phantom", "Unrolled"]
