"""Models of other libraries, described by tables that one engine reads."""

from deqseq.integrations.foreign.files import from_pretrained, from_state
from deqseq.integrations.foreign.reference import from_reference_config, to_reference_state

__all__ = [
    "from_pretrained",
    "from_reference_config",
    "from_state",
    "to_reference_state",
]
