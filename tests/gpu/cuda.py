"""What the tests on a GPU share: where they run, and what may not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from sparcel import SparseStream

GPU = torch.device("cuda", 0)

_WHY = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU"

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=_WHY),
]

_LONG = 20_000_000
"""Cycles of a GPU: about 10 ms, which is longer than the host takes to queue what follows."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Let torch raise where the host would wait for the GPU, except for an event.

    `sparcel.core.device.read` waits for one. The mode is that of the whole process, so it holds for
    sparcel's thread and for those of the backward pass too.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def delay() -> None:
    """Keep the current stream busy, so that what is queued on it next comes late.

    Whoever uses that without having been told to wait finds what was in the memory before.
    """
    torch.cuda._sleep(_LONG)


def moved(stream: SparseStream, device: torch.device | str) -> SparseStream:
    """Return a stream with its parts on a device."""
    indices = None if stream.indices is None else stream.indices.to(device)
    finite = stream.finite.to(device) if isinstance(stream.finite, Tensor) else stream.finite
    return SparseStream.unchecked(indices, stream.values.to(device), stream.size, finite)


def on_host(stream: SparseStream) -> SparseStream:
    """Return a stream on the CPU, as `tests.strategies.same_stream` compares it."""
    found = moved(stream, "cpu")
    found.finite = bool(found.finite)
    return found
