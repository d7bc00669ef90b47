"""Tests here run on a GPU, or on a device that pretends to be one: ``DEVICE=pretend``."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

DEVICE = os.environ.get("DEVICE", "cuda")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """An error where there is no GPU, never a silent pass."""
    if DEVICE == "pretend":
        import pretend

        with pretend.Device():
            yield
    else:
        assert torch.cuda.is_available(), "there is no CUDA device"
        yield


@pytest.fixture
def counted_waits() -> Callable[[], contextlib.AbstractContextManager[list[str]]]:
    """A block that lists the waits of the host for the device; the list is complete at its end."""
    if DEVICE == "pretend":
        import pretend

        return pretend.counted_waits
    return waits_for_cuda


@contextlib.contextmanager
def waits_for_cuda() -> Iterator[list[str]]:
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        # it also warns that this mode is a prototype
        if "called a synchronizing CUDA operation" in str(warning.message):
            waits.append(f"{warning.filename}:{warning.lineno}")
