"""Random numbers that every rank draws alike, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel.core.kernels.definitions.few_bits import philox


def integers(count: int, below: int, seed: int, step: int) -> Tensor:
    """Return int64 ``[count]``, each uniform in ``[0, below)``, decided by seed and step alone.

    Numbers are 63 random bits modulo ``below``; their probabilities differ by less than
    below/2**63. A longer sequence begins with the shorter one.
    """
    # The random rounding of values may use the same seed; its counters are below 2**32.
    first = (step + 1) << 32
    blocks = torch.arange(first, first + (count + 1) // 2, device="cpu")
    a, b, c, d = philox(blocks, seed)
    bits = torch.stack([(a << 31) | (b >> 1), (c << 31) | (d >> 1)], dim=1).view(-1)
    return bits[:count] % below


def distinct(count: int, below: int, seed: int, step: int) -> Tensor:
    """Return ``count`` different numbers in ``[0, below)``, sorted; each set is equally likely.

    They are the first ``count`` different numbers in the sequence of `integers`. If ``count``
    is more than half of all numbers, the others are drawn, and left out. Memory grows with
    ``count``.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if 2 * count > below:
        left = torch.ones(below, dtype=torch.bool, device="cpu")
        left[distinct(below - count, below, seed, step)] = False
        return left.nonzero().view(-1)
    # Up to one half, the expected length of the sequence is 2·ln 2 times the count at most.
    length = count + count // 2 + 64
    while True:
        drawn, position = integers(length, below, seed, step).sort(stable=True)
        first = torch.ones_like(drawn, dtype=torch.bool)
        torch.ne(drawn[1:], drawn[:-1], out=first[1:])
        drawn, position = drawn[first], position[first]
        if drawn.numel() >= count:
            return drawn[position.argsort()[:count]].sort().values
        length *= 2
