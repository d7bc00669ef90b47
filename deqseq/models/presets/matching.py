"""Baselines of equal size."""

import math
from dataclasses import replace
from itertools import count

from deqseq.backbones import LlamaConfig
from deqseq.check import check_integer, check_type
from deqseq.models.presets.parameters import parameter_count
from deqseq.models.specification import LanguageModelSpec


def widened(spec: LanguageModelSpec, parameters: int) -> LanguageModelSpec:
    """The same model, but so wide that it has about as many parameters as another one.

    An explicit model lacks an implicit one's injection and magnitudes; this makes up for them. Only ``d_model`` grows,
    by steps that keep heads whole, a Llama's of even width.

    Args:
        spec: the model; with at most ``parameters`` parameters, or it stays as it is.
        parameters: how many it is to have, as :func:`parameter_count` counts them.

    Returns:
        The model whose number of parameters is nearest.

    Example:
        >>> import deqseq as dq
        >>> implicit = dq.LanguageModelSpec(500, dq.LlamaConfig(d_model=96, n_heads=4))
        >>> wanted = parameter_count(implicit).total
        >>> wider = widened(implicit.explicit(), wanted)
        >>> wider.backbone.d_model, round(parameter_count(wider).total / wanted, 2)
        (104, 0.97)
    """
    check_type("spec", spec, LanguageModelSpec, 'dq.preset("mamba2-130m-implicit")')
    check_integer("parameters", parameters, 1)
    sizes = spec.backbone
    step = (
        2 * sizes.n_heads if isinstance(sizes, LlamaConfig) else sizes.headdim // math.gcd(sizes.headdim, sizes.expand)
    )
    narrower, below = spec, parameter_count(spec).total
    if below >= parameters:
        return spec
    for d_model in count(sizes.d_model + step, step):
        wider = replace(spec, backbone=replace(sizes, d_model=d_model))
        above = parameter_count(wider).total
        if above >= parameters:
            return wider if above - parameters < parameters - below else narrower
        narrower, below = wider, above
    raise AssertionError("widths do not end")
