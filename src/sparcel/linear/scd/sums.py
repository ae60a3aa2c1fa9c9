"""Sums of short arrays over all ranks, in few messages."""

from __future__ import annotations

import numpy as np
import torch

from sparcel import patterns
from sparcel.comm import Communicator
from sparcel.rows.rows import Array


def summed(own: Array, comm: Communicator) -> Array:
    """Return the sum of the ranks' arrays of equal shape, with the same bits on all ranks.

    All ranks call, in a job. Partners exchange all they have, at doubling distances; the ranks
    beyond the largest power of two take part through one of the others. Arrays travel as they are.
    `sparcel.collectives.recursive_doubling` does the same with streams, and took about three times
    as long for 2 to 16,000 numbers on two and four ranks of one machine (0.36 against 0.12 ms).
    """
    total = torch.from_numpy(np.ascontiguousarray(own)).reshape(-1)
    powers, partner = patterns.fold(comm.rank, comm.size)
    if comm.rank >= powers:
        assert partner is not None, "a rank beyond the power of two has a partner"
        comm.exchange({partner: _message(total)}, {})
        total = _swapped(None, partner, total, comm)
    else:
        if partner is not None:
            total = total + _swapped(None, partner, total, comm)
        # Partners add the same two sums, whose order does not matter.
        for peer, *_ in patterns.doubling(comm.rank, powers):
            total = total + _swapped(total, peer, total, comm)
        if partner is not None:
            comm.exchange({partner: _message(total)}, {})
    return total.numpy().reshape(own.shape)


def _swapped(
    given: torch.Tensor | None, peer: int, like: torch.Tensor, comm: Communicator
) -> torch.Tensor:
    """Send a rank an array, or none, and return the one that it sends."""
    sends = {} if given is None else {peer: _message(given)}
    return comm.exchange(sends, {peer: like.nbytes})[peer].view(like.dtype)


def _message(array: torch.Tensor) -> torch.Tensor:
    return array.view(torch.uint8)
