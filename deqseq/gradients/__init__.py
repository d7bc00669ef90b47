"""Gradient estimators, one a file."""

from deqseq.gradients.base import AttachedGradient, Gradient
from deqseq.gradients.implicit import Implicit
from deqseq.gradients.one_step import OneStep
from deqseq.gradients.phantom import Phantom
from deqseq.gradients.unrolled import Unrolled

__all__ = ["AttachedGradient", "Gradient", "Implicit", "OneStep", "Phantom", "Unrolled"]
