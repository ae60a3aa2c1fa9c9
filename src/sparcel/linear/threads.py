"""How many threads are worth waking."""

from __future__ import annotations

import torch

_WORTH_NS = 300_000
"""What a thread must have to do: to wake it takes tens of microseconds."""


def threads_for(nanoseconds: float) -> int:
    """Return the threads of a kernel that takes one thread so long: torch's, or fewer."""
    return max(1, min(torch.get_num_threads(), int(nanoseconds / _WORTH_NS)))
