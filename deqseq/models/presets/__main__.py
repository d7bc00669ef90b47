"""Print the table of all presets."""

from deqseq.models.presets.parameters import preset_table

print(preset_table())
