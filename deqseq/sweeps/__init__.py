"""Which tokens are solved together: from all of them (simultaneous) to one at a time (sequential)."""

from deqseq.sweeps.base import Chunked, Lockstep, Sequential, Simultaneous, Sliding, Sweep

__all__ = ["Chunked", "Lockstep", "Sequential", "Simultaneous", "Sliding", "Sweep"]
