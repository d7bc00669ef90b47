"""What reports on a model share: their arguments, and how they print."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch

from deqseq.arguments import check_type
from deqseq.config import SolveConfig, resolve
from deqseq.models.causal_lm import CausalLM, Tokens, check_tokens
from deqseq.models.implicit import ImplicitModel
from deqseq.models.padding import check_mask
from deqseq.start import RandomStart
from deqseq.types import Mask

SHOWN = 8
"""How many rows of a batch a report prints."""


def check_call(
    model: CausalLM,
    ids: Tokens,
    mask: Mask | None,
    solve: SolveConfig | None,
    fields: Mapping[str, Any],
) -> tuple[ImplicitModel, Mask, SolveConfig]:
    """Check the arguments; the part that is solved, the real tokens, and how to solve in eval mode.

    Random starts have a seed, so that all solves of a diagnostic begin at the same states.
    """
    core = model.core
    check_type("model.model", model.model if core is None else core, ImplicitModel)
    assert core is not None
    config = resolve(core.eval_solve or core.solve, solve, fields)
    if isinstance(config.start, RandomStart) and config.start.seed is None:
        config = replace(config, start=replace(config.start, seed=0))
    check_tokens("ids", ids, model.embedding)
    if mask is not None:
        check_mask(mask, ids)
    return core, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask, config


def text_table(header: SequenceOf[str], lines: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    columns = list(zip(header, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left, *right = zip(columns, widths, strict=True)
    aligned = [[text.ljust(left[1]) for text in left[0]]]
    aligned += [[text.rjust(width) for text in column] for column, width in right]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def remaining(rows: int) -> str:
    """What is printed instead of further rows."""
    return f"\n... and {rows - SHOWN} more rows" if rows > SHOWN else ""
