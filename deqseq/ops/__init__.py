"""Sequence operations: a plain oracle beside each fast path."""

from deqseq.ops.fused import Backend, BackendError

__all__ = ["Backend", "BackendError"]
