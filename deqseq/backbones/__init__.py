"""Backbones: the maps that are iterated."""

from deqseq.backbones.affine import Affine, AffineCache
from deqseq.backbones.base import Backbone, Cache, Injection, Trail
from deqseq.backbones.llama import Llama, LlamaConfig
from deqseq.backbones.llama_cache import LlamaCache
from deqseq.backbones.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from deqseq.backbones.token_map import BackboneMap

__all__ = [
    "Affine",
    "AffineCache",
    "Backbone",
    "BackboneMap",
    "Cache",
    "Injection",
    "Llama",
    "LlamaCache",
    "LlamaConfig",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "Trail",
]
