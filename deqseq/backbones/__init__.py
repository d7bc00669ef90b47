"""Backbones: the maps that are iterated."""

from deqseq.backbones.affine import Affine, AffineCache
from deqseq.backbones.base import Backbone, Cache, Inputs, JointCache
from deqseq.backbones.llama import Llama, LlamaCache, LlamaConfig
from deqseq.backbones.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from deqseq.backbones.wrappers import (
    AddInjection,
    ConcatInjection,
    DecayInjection,
    Injected,
    Injection,
    Looped,
)

__all__ = [
    "AddInjection",
    "Affine",
    "AffineCache",
    "Backbone",
    "Cache",
    "ConcatInjection",
    "DecayInjection",
    "Injected",
    "Injection",
    "Inputs",
    "JointCache",
    "Llama",
    "LlamaCache",
    "LlamaConfig",
    "Looped",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
]
