"""Sequence operations: a plain oracle beside each fast path."""
