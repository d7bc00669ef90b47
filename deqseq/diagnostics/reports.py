"""What reports on a model share: their arguments, and how they print."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch

from deqseq.arguments import check_type
from deqseq.config import SolveConfig, resolve
from deqseq.models.causal_lm import CausalLM, Tokens, token_ids
from deqseq.models.implicit import ImplicitModel
from deqseq.start import RandomStart
from deqseq.types import Mask


def check_call(
    model: CausalLM,
    ids: Tokens,
    mask: Mask | None,
    solve: SolveConfig | None,
    fields: Mapping[str, Any],
) -> tuple[ImplicitModel, Mask, SolveConfig]:
    """Check the arguments; return the part that is solved, the real tokens, and how to solve.

    Random starts get a seed, so that all solves of a diagnostic begin at the same states. The model
    itself checks the shape of the mask.
    """
    core: Any = model.core or model.model
    check_type("model.model", core, ImplicitModel)
    config = resolve(core.eval_solve or core.solve, solve, fields)
    if isinstance(config.start, RandomStart) and config.start.seed is None:
        config = replace(config, start=replace(config.start, seed=0))
    ids = token_ids("ids", ids, model.embedding)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return core, real, config


def text_table(header: SequenceOf[str], lines: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join(f"{{:>{width}}}" for width in widths).replace(">", "<", 1)
    return "\n".join(template.format(*row).rstrip() for row in rows)
