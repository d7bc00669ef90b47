"""The state-space-dual scan of Mamba2."""

from deqseq.ops.ssd.scan import SSDOutput, ssd, ssd_state

__all__ = ["SSDOutput", "ssd", "ssd_state"]
