"""The states that a solve begins from."""

import torch
from torch import Tensor

from deqseq.config import SolveConfig
from deqseq.evaluate import check_start
from deqseq.gradients import AttachedGradient, Gradient
from deqseq.models.padding import Padding
from deqseq.start import initial_state
from deqseq.types import Sequence


def check_states(start: Tensor, x: Tensor) -> None:
    """Refuse states that do not fit the embedded tokens, or the first of them."""
    check_start("start", start)
    some = x[:, : start.shape[1]] if start.ndim == 3 else x
    if start.shape != some.shape or start.dtype != x.dtype or start.device != x.device:
        wanted, got = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (x, start))
        raise ValueError(f"start must be like the embedded tokens, or the first of them, {wanted}, got {got}")


def start_states(
    tokens: Sequence, given: Tensor | None, padding: Padding, config: SolveConfig, gradient: Gradient | None = None
) -> Sequence:
    """Where the iteration begins; padding is zero in any case."""
    if given is None and config.start != "input":
        states, real = initial_state(config.start, tokens), padding.mask
        return states if real is None or config.start == "zero" else states.masked_fill(~real[..., None], 0)
    if given is not None and given.shape[1] < tokens.shape[1]:
        own = padding.back(start_states(tokens, None, padding, config, gradient))
        given = torch.cat([given, own[:, given.shape[1] :]], dim=1)
    tokens = tokens if given is None else padding.compact(given)
    tokens = tokens.nan_to_num(0.0, 0.0, 0.0)  # a row that is not finite diverges alone
    # a fixed point does not depend on where its solve began: only a differentiated iteration does
    differentiated = gradient is not None and not isinstance(gradient, AttachedGradient)
    return tokens if differentiated else tokens.detach()
