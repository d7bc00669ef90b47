"""The states that a model's solve begins from."""

from torch import Tensor

from deqseq.evaluate import check_start
from deqseq.models.padding import Padding
from deqseq.start import Start, initial_state
from deqseq.types import Sequence


def check_states(start: Tensor, x: Tensor) -> None:
    """Refuse states that do not fit the embedded tokens."""
    check_start("start", start)
    if start.shape != x.shape or start.dtype != x.dtype or start.device != x.device:
        wanted, got = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (x, start))
        raise ValueError(f"start must be like the embedded tokens, {wanted}, got {got}")


def start_states(
    tokens: Sequence, given: Tensor | None, padding: Padding, start: Start
) -> Sequence:
    """Where the iteration begins, real tokens first: at ``given`` states, or where the
    model does.
    """
    if given is not None:
        return padding.compact(given)
    states = initial_state(start, tokens)
    if start == "zero":
        return states
    if padding.mask is not None:
        states = states.masked_fill(~padding.mask[..., None], 0)
    return states.nan_to_num(0.0, 0.0, 0.0)  # a row that is not finite diverges on its own
