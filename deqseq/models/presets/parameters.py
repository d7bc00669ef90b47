"""How many parameters a language model has, and where."""

from dataclasses import dataclass, fields

import torch

from deqseq.check import check_type
from deqseq.gradients import Phantom
from deqseq.models.presets.catalogue import PRESETS
from deqseq.models.specification import LanguageModelSpec

PLACES = {"injection_norm": "injection", "norm": "final_norm", "norm_f": "final_norm"}
"""Parts of a model that are counted under another name than their own."""


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a language model, part by part.

    Attributes:
        embedding: of the tokens; a tied head is this same matrix and is not counted again.
        layers: of all blocks, their norms included.
        injection: its norm, weights and bias; 0 in an explicit model.
        final_norm: after the last block.
        head: of a head that is not tied; else 0.
        magnitudes: those among the layers and the injection that weight normalisation adds, one for each row of a
            weight.

    Example:
        >>> ParameterCount(embedding=100, layers=20, injection=4, final_norm=1, head=0, magnitudes=2).total
        125
    """

    embedding: int
    layers: int
    injection: int
    final_norm: int
    head: int
    magnitudes: int

    @property
    def total(self) -> int:
        """Everything that is trained, each parameter once."""
        return self.embedding + self.layers + self.injection + self.final_norm + self.head


def parameter_count(spec: LanguageModelSpec) -> ParameterCount:
    """Count the parameters of a model by building it without memory, on the meta device.

    Args:
        spec: the model.

    Returns:
        The count, part by part.

    Example:
        >>> from deqseq.models.presets import preset
        >>> f"{parameter_count(preset('llama3-130m-explicit')).total:,}"
        '123,566,592'
    """
    check_type("spec", spec, LanguageModelSpec, 'dq.preset("mamba2-130m-implicit")')
    with torch.device("meta"):
        model = spec.build()
    parts: dict[str, int] = dict.fromkeys((field.name for field in fields(ParameterCount)), 0)
    for name, parameter in model.named_parameters():  # a shared parameter is named once
        place = name.removeprefix("model.backbone.").partition(".")[0]
        parts[PLACES.get(place, place)] += parameter.numel()
        if name.endswith("parametrizations.weight.original0"):
            parts["magnitudes"] += parameter.numel()
    return ParameterCount(**parts)


def preset_table() -> str:
    """All presets with their parameters and budgets, as a Markdown table.

    Returns:
        The table, one line a preset, without a newline at the end.
    """
    columns = ("parameters", "embedding", "layers", "injection", "final norm", "magnitudes")
    titles = ("preset", *columns, "iterations", "in evaluation", "phantom steps")
    lines = [titles, ("---", *["---:"] * (len(titles) - 1))]
    for name, spec in PRESETS.items():
        count = parameter_count(spec)
        numbers = (count.total, count.embedding, count.layers, count.injection, count.final_norm, count.magnitudes)
        lines.append((name, *(f"{number:,}" for number in numbers), *_budgets(spec)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _budgets(spec: LanguageModelSpec) -> tuple[str, str, str]:
    if spec.solve is None:
        return "one pass", "one pass", ""
    phantom = str(spec.solve.gradient.steps) if isinstance(spec.solve.gradient, Phantom) else ""
    return f"≤ {spec.solve.stop.max_steps}", f"≤ {(spec.eval_solve or spec.solve).stop.max_steps}", phantom
