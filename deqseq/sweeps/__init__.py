"""Which tokens are solved together: the dial from simultaneous to sequential."""

from deqseq.sweeps.base import Sweep, TokenMap
from deqseq.sweeps.chunked import Chunked, Sequential, Simultaneous
from deqseq.sweeps.sliding import Sliding

__all__ = ["Chunked", "Sequential", "Simultaneous", "Sliding", "Sweep", "TokenMap"]
