"""The layers that backbones are made of; parameters are named as in their public counterparts."""

from deqseq.layers.block import Mamba2Block
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.dropout import dropout_mask
from deqseq.layers.mamba2_mixer import Mamba2Mixer, MixerState
from deqseq.layers.mlp import SwiGLU
from deqseq.layers.rms_norm import GatedRMSNorm, RMSNorm
from deqseq.layers.weight_norm import apply_weight_norm, weights_computed_once

__all__ = [
    "CausalConv1d",
    "GatedRMSNorm",
    "Mamba2Block",
    "Mamba2Mixer",
    "MixerState",
    "RMSNorm",
    "SwiGLU",
    "apply_weight_norm",
    "dropout_mask",
    "weights_computed_once",
]
