"""Sums of squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel import device

CHUNK = 1 << 17
"""Entries of a vector whose squares are summed by themselves."""


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each vector, summed up in float64.

    On the CPU the sums depend neither on the number of threads nor on the instruction set, and on
    a GPU every run gives the same. That of a vector is the sum of those of its chunks, one after
    another, so whoever cuts vectors at multiples of `sparcel.kernels.CHUNK` gets the same bits.

    Parameters
    ----------
    vectors
        Vectors of any length, each of any float dtype, all on one device for few launches.

    Returns
    -------
    Tensor
        float64 ``[len(vectors)]``, on the device of the first vector.
    """
    # The norms of chunks take few launches on a GPU.
    chunks = [chunk for vector in vectors for chunk in vector.detach().split(CHUNK)]
    owners = [place for place, vector in enumerate(vectors) for _ in vector.split(CHUNK)]
    kinds = [(chunk.dtype, chunk.device) for chunk in chunks]
    squares = torch.zeros(len(chunks), dtype=torch.float64, device="cpu")
    for kind in dict.fromkeys(kinds):  # those of other kinds in a call may change how torch sums
        own = [place for place, other in enumerate(kinds) if other == kind]
        norms = torch._foreach_norm([chunks[place] for place in own], 2, dtype=torch.float64)
        squares[own] = device.read(torch.stack(norms).square_())
    sums = torch.zeros(len(vectors), dtype=torch.float64, device="cpu")
    places = torch.tensor(owners, dtype=torch.int64, device="cpu")
    sums.index_add_(0, places, squares)  # one by one on the CPU
    return device.put(sums, vectors[0].device, sums.dtype) if vectors else sums
