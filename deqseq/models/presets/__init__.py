"""The models of the paper, by name; ``python -m deqseq.models.presets`` prints them with their sizes."""

from deqseq.models.presets.catalogue import PRESETS, preset
from deqseq.models.presets.matching import widened
from deqseq.models.presets.parameters import ParameterCount, parameter_count, preset_table

__all__ = ["PRESETS", "ParameterCount", "parameter_count", "preset", "preset_table", "widened"]
