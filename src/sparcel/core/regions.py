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

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel.core import device, formats, kernels
from sparcel.core.comm import Communicator, Rows
from sparcel.core.device import Number, all_of, finite_flag
from sparcel.core.formats import Expected, FewBits, Format, message_length
from sparcel.core.kernels import Addition, Densities, Leg, Regions
from sparcel.core.stream import WRITTEN, SparseStream
from sparcel.core.units import share_of
from sparcel.core.wire import Wire
from sparcel.errors import FormatError

RETURNED = 3.0
"""How many times as many coordinates come back as a rank sends, unless that is told."""

_ROOM, _SPARE = 2, 64
"""A message has room for so many times the entries that are expected, and some more: a threshold
from a sample lets a few more through, and ties may let all through."""


@lru_cache(maxsize=1024)
def leg(regions: Regions, shares: Densities, format: Format, dtype: torch.dtype) -> Leg:
    """Return the leg in which shares of the regions travel, in values of a dtype."""
    value_bytes = dtype.itemsize
    expected, most = [], []
    for rank in range(regions.ranks):
        asked = [
            (last - first, share_of(density, last - first))
            for _, density, first, last in regions.parts(shares, rank)
        ]
        expected.append(sum(wanted for _, wanted in asked))
        most.append(sum(min(count, _ROOM * wanted + _SPARE) for count, wanted in asked))
    lengths = [regions.length(rank) for rank in range(regions.ranks)]
    dense = sum(expected) >= format.dense_from(max(1, regions.size), value_bytes)
    if dense:
        expected = most = lengths
    bounds = [
        format.nbytes(None if dense else nnz, length, value_bytes)
        for nnz, length in zip(most, lengths, strict=True)
    ]
    headers = [format.blank_header(length, dtype, dense).pack() for length in lengths]
    compiled = dtype == torch.float32 and regions.size <= _LONGEST
    bits, group = compiled_bits(format, dense) if compiled else (0, 0)
    return Leg(
        regions,
        shares,
        dense,
        tuple(most),
        tuple(expected),
        tuple(bounds),
        tuple(headers),
        dtype,
        bits,
        group,
        _Code(format),
    )


_LONGEST = 2**31 - 1
"""The longest vector of compiled passes, whose indices are int32."""

_GROUPS = (8, 16, 32, 64)
"""How many values may share a scale in compiled passes: blocks of a region have whole scales."""


def compiled_bits(format: Format, dense: bool) -> tuple[int, int]:
    """Return a format's bits and the values that share a scale, where compiled passes know it."""
    code = format.value_code
    if not isinstance(code, FewBits) or code.stochastic or code.scale != "bfloat16":
        return 0, 0
    known = code.block in _GROUPS and (dense or format.indices == "packed")
    return (code.bits, code.block) if known else (0, 0)


@dataclass(frozen=True)
class _Code:
    """See `sparcel.core.kernels.regions.Code`."""

    format: Format

    def encode(
        self,
        size: int,
        indices: Tensor | None,
        values: Tensor,
        finite: bool | Tensor,
        turn: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        # Python hashes whole numbers alike everywhere.
        key = hash((self.format.seed, *turn))
        packet = self.format.encode(SparseStream.unchecked(indices, values, size, finite), key)
        return formats.whole(packet.message), packet.stream.values

    def decode(
        self, size: int, dtype: torch.dtype, message: Tensor
    ) -> tuple[Tensor | None, Tensor, bool | Tensor]:
        stream = formats.decode([message], Expected(size, dtype, None))
        return stream.indices, stream.values, stream.finite


class Returned(NamedTuple):
    """What the owners returned, over the divisor, and what this rank did for it.

    Flags and counts are tensors on a GPU.

    Attributes
    ----------
    average
        In the gradient's dtype; `WRITTEN` if it is in ``out``.
    finite
        Whether all vectors and the average are.
    sent
        How many entries this rank sent to other owners.
    entries
        How many coordinates came back.
    magnitudes
        By how much the magnitude of memory and gradient fell in each leg.
    """

    average: SparseStream
    finite: bool | Tensor
    sent: Number
    entries: Number
    magnitudes: tuple[Number, Number]


def exchange_regions(
    addition: Addition,
    comm: Communicator,
    step: int,
    up: Leg,
    down: Leg,
    divisor: float,
    out: Tensor | None = None,
) -> Returned:
    """Do both exchanges; leave in ``addition.scratch`` what this rank keeps.

    The caller is inside a call by which the ranks have agreed on the legs and the vector.

    Parameters
    ----------
    step
        Decides random rounding, and where samples are taken.
    up, down
        How much a rank sends of each region, and how much an owner returns of its own; the same on
        all ranks, as are the vector's size and dtype.
    divisor
        What the sums are divided by for the average.
    out
        Where the average is written; it may be the gradient.

    There are two exchanges of P−1 messages, all outstanding at once. Words: those of up, and of
    down, each times (P−1)/P.
    """
    rank = comm.rank
    entered = kernels.enter(addition, up, rank, step)
    arrived = comm.swap(entered.messages, up.bounds, message_length)
    collected = kernels.collect(addition, arrived, up, down, rank, step)
    device.later(collected.fault, partial(_fault, comm, arrived, up, rank))
    returned = comm.spread(collected.message, down.bounds, message_length)
    magnitudes = entered.magnitude, collected.magnitude
    if out is None and not down.dense:
        average = _stream_of(comm, returned, down, divisor, addition.gradient.dtype)
        return Returned(average, average.finite, entered.sent, average.nnz, magnitudes)
    update = addition.gradient.new_empty(down.regions.size) if out is None else out
    entries, finite, fault = kernels.deliver(update, returned, down, divisor)
    device.later(fault, partial(_fault, comm, returned, down))
    average = WRITTEN
    if out is None:
        average = SparseStream.unchecked(None, update, update.numel(), finite)
    return Returned(average, finite, entered.sent, entries, magnitudes)


def _stream_of(
    comm: Communicator, returned: Rows, down: Leg, divisor: float, dtype: torch.dtype
) -> SparseStream:
    """Return the average of what the owners returned as a stream, in the gradient's dtype."""
    wire, regions = Wire(comm), down.regions
    indices, values, flags = [], [], []
    for owner in range(regions.ranks):
        expected = Expected(regions.length(owner), down.dtype, None)
        stream = wire.decode(owner, [returned[owner]], expected)
        if stream.indices is None:
            raise FormatError(f"rank {owner} sent rank {comm.rank} all of a region, not a part")
        indices.append(regions.coordinates(owner, stream.indices))
        values.append(stream.values)
        flags.append(stream.finite)
    average = kernels.average(torch.cat(values), divisor).to(dtype)
    places, order = torch.cat(indices).sort()
    places = places.to(kernels.index_dtype(regions.size))
    finite = all_of([*flags, finite_flag(average)])
    return SparseStream.unchecked(places, average[order], regions.size, finite)


def _fault(comm: Communicator, messages: Rows, leg: Leg, owner: int | None = None) -> Exception:
    """Return what is wrong with a message of a region; raise it if the decoder finds it, too.

    ``owner`` is whose region all messages are of; None if each is of its sender's.
    """
    wire = Wire(comm)
    for source in range(comm.size):
        if source != owner:
            length = leg.regions.length(source if owner is None else owner)
            wire.decode(source, [messages[source]], Expected(length, leg.dtype, None))
    return FormatError(
        f"rank {comm.rank} got a message that does not hold values of a region in the same format"
    )
