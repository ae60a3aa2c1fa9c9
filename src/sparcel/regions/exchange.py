"""Two exchanges, whatever the number of ranks: to the owners of regions, and back.

``` text
x = memory + gradient
send each other owner the largest coordinates of x in its region        (up)
x in the own region += what the other ranks sent of it
return the largest coordinates of x in the own region to all ranks      (down)
memory = x less what was sent or returned, as the receivers read it
update = what all owners returned / P
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel.comm import Call
from sparcel.formats import Format
from sparcel.kernels import Addition, Phase
from sparcel.patterns import rotation
from sparcel.regions.by_streams import ByStreams
from sparcel.regions.fused import Fused
from sparcel.stages import Exchange, Problem, Stage, Work
from sparcel.stream import SparseStream
from sparcel.wire import Wire


class Returned(NamedTuple):
    """What the owners returned, over the divisor, and what this rank did for it.

    Attributes
    ----------
    average
        Like the gradient: dense and in ``out``, if that was given, else a stream. Not ``finite`` if
        a vector or an average is not.
    entries
        How many coordinates came back.
    sent
        How many entries this rank sent to other owners.
    magnitude
        By how much the magnitude of memory and gradient fell.
    applied
        The coordinates that this rank selected, in parts, if the memory has momentum.
    """

    average: SparseStream
    entries: int
    sent: int
    magnitude: float | Tensor
    applied: Sequence[Tensor]


def exchange_regions(
    addition: Addition,
    wire: Wire,
    up: Phase,
    down: Phase,
    divisor: float,
    out: Tensor | None = None,
) -> Returned:
    """Do both exchanges; leave in ``addition.scratch`` what this rank keeps.

    Parameters
    ----------
    up, down
        How much a rank sends of each region, and how much an owner returns of its own; the same on
        all ranks, as are the vector's size and dtype and the wire's format.
    divisor
        What the sums are divided by for the average.
    out
        Where the average is written; it may be the gradient.

    There are two exchanges of P−1 messages, all outstanding at once. Words: those of up, and of
    down, each times (P−1)/P.
    """

    def job() -> Returned:
        fused = Fused.can(addition, wire.format, (up, down))
        passes: Fused | ByStreams = (Fused if fused else ByStreams)(addition, wire)
        rounds = rotation(wire.rank, wire.size)
        messages = passes.enter(up)
        arrived = wire.comm.exchange_parts(
            {owner: messages[owner] for owner, *_ in rounds},
            {source: up.bounds[wire.rank] for _, source, *_ in rounds},
            wire.control,
        )
        mine = passes.collect(arrived, up, down)
        returned = wire.comm.exchange_parts(
            {rank: mine for rank, *_ in rounds},
            {owner: down.bounds[owner] for _, owner, *_ in rounds},
            wire.control,
        )
        # A stream of the average is made of the messages' streams.
        reader = ByStreams(addition, wire) if out is None else passes
        average, entries = reader.deliver({**returned, wire.rank: mine}, down, divisor, out)
        return Returned(average, entries, passes.sent, passes.magnitude, passes.applied)

    return wire.comm.call(_call(addition.memory.dtype, wire.format, up, down), job)


@lru_cache(maxsize=1024)
def _call(dtype: torch.dtype, format: Format, up: Phase, down: Phase) -> Call:
    """Describe the exchanges by what all ranks must share."""
    facts = {"size": up.regions.size, "dtype": dtype, "format": format}
    return Call.of("exchange_regions", {**facts, "up": up.shares, "down": down.shares})


def stages(problem: Problem, returned: float) -> Iterator[Stage]:
    """Yield the stages of both exchanges, in which the owners return ``returned`` coordinates."""
    ranks, format = problem.ranks, problem.format
    region = problem.size / ranks

    def message(entries: float) -> float:
        """Return the bytes of a message of a region, of so many coordinates of the vector."""
        dense = entries >= format.dense_from(problem.size, problem.itemsize)
        return format.nbytes(None if dense else entries / ranks, region, problem.itemsize)

    up, down = message(problem.k), message(returned)
    yield Work("small", _SMALL)
    yield Work("add", problem.size, times=_ENTERING)
    if ranks > 1:
        yield Exchange("rotate", (up,) * (ranks - 1), (up,) * (ranks - 1))
        yield Work("add", region, times=ranks)
        yield Exchange("rotate", (down,) * (ranks - 1), (down,) * (ranks - 1))
    yield Work("add", problem.size, times=_DELIVERING)


_SMALL = 50
"""Small operations of a step, besides those on its vectors."""

_ENTERING, _DELIVERING = 2.5, 1.0
"""The time to make messages of a vector, and to read them, in additions to the vector."""
