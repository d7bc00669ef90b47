"""Sequence operations: a plain oracle beside each fast path."""

from deqseq.ops.backend import Backend, BackendError

__all__ = ["Backend", "BackendError"]
