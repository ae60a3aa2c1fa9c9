"""Sum of short dense arrays, which travel as they are: recursive doubling without streams."""

from __future__ import annotations

import torch
from torch import Tensor

from sparcel import patterns
from sparcel.comm import Communicator


def plain_sum(own: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of the ranks' arrays of equal shape, with the same bits on all ranks.

    All ranks call, in a job. Arrays are contiguous and on the host. `recursive_doubling` does the
    same with streams, and took about three times as long for 2 to 16,000 numbers on two and four
    ranks of one machine (0.36 against 0.12 ms).
    """
    total = own.reshape(-1)
    powers, partner = patterns.fold(comm.rank, comm.size)

    def send(to: int) -> None:
        comm.exchange({to: total.view(torch.uint8)}, {})

    def receive(source: int) -> Tensor:
        return comm.exchange({}, {source: total.nbytes})[source].view(total.dtype)

    if comm.rank >= powers:
        assert partner is not None, "a rank beyond the power of two has a partner"
        send(partner)
        return receive(partner).view(own.shape)
    if partner is not None:
        total = total + receive(partner)
    for peer, *_ in patterns.doubling(comm.rank, powers):
        arrived = comm.exchange({peer: total.view(torch.uint8)}, {peer: total.nbytes})[peer]
        total = total + arrived.view(total.dtype)  # Partners add the same two, in either order.
    if partner is not None:
        send(partner)
    return total.view(own.shape)
