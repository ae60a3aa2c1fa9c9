"""Gathering in ⌈log₂P⌉ rounds, by Bruck's pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from sparcel import patterns

if TYPE_CHECKING:
    from sparcel.comm.communicator import Communicator

Message = TypeVar("Message")


def gather_in_rounds(
    comm: Communicator,
    own: Message,
    at_most: Sequence[int],
    join: Callable[[list[Message]], Sequence[Tensor]],
    cut: Callable[[list[Tensor], Sequence[int]], Sequence[Message]],
    control: int = 0,
) -> list[Message]:
    """Return the messages of all ranks, by rank.

    Parameters
    ----------
    own
        This rank's message.
    at_most
        The most bytes of each rank's message; the same on all ranks.
    join
        Given several messages, returns the parts of the one in which they travel.
    cut
        Given what came, in parts, and the ranks whose messages it holds, returns these messages.
    control
        How many bytes of each rank's message are control; `join` puts these first.
    """
    held = [own]  # the messages of this rank and of those that follow it
    for below, above, _, count in patterns.bruck(comm.rank, comm.size):
        ranks = [(above + place) % comm.size for place in range(count)]
        bound = sum([at_most[rank] for rank in ranks])
        leaving = {below: join(held[:count])}
        came = comm.exchange_parts(leaving, {above: bound}, count * control)[above]
        held += cut(came, ranks)
    return [held[(rank - comm.rank) % comm.size] for rank in range(comm.size)]
