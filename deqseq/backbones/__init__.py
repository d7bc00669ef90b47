"""Backbones: the maps that are iterated."""

from deqseq.backbones.affine import Affine, AffineCache
from deqseq.backbones.base import Backbone, Cache, Injection
from deqseq.backbones.mamba2 import Mamba2, Mamba2Cache, Mamba2Config

__all__ = ["Affine", "AffineCache", "Backbone", "Cache", "Injection", "Mamba2", "Mamba2Cache", "Mamba2Config"]
