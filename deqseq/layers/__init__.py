"""The layers that backbones are made of; parameters are named as in their public counterparts."""

from deqseq.layers.attention import Attention
from deqseq.layers.block import LlamaBlock, Mamba2Block, Norms, SwiGLU, dropout_mask
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.mamba2_mixer import Mamba2Mixer
from deqseq.layers.rms_norm import GatedRMSNorm, RMSNorm
from deqseq.layers.rotary import RotaryScaling, rotary_frequencies, rotary_tables
from deqseq.layers.weight_norm import apply_weight_norm, fold_weight_norm, with_weights

__all__ = [
    "Attention",
    "CausalConv1d",
    "GatedRMSNorm",
    "LlamaBlock",
    "Mamba2Block",
    "Mamba2Mixer",
    "Norms",
    "RMSNorm",
    "RotaryScaling",
    "SwiGLU",
    "apply_weight_norm",
    "dropout_mask",
    "fold_weight_norm",
    "rotary_frequencies",
    "rotary_tables",
    "with_weights",
]
