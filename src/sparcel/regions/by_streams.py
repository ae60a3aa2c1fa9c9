"""The passes of the two exchanges, with streams: any device, dtype and format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import finite_flag
from sparcel.formats import Expected, Message
from sparcel.kernels import Addition, Phase
from sparcel.ops import SUM
from sparcel.profiling import timed
from sparcel.stream import SparseStream, all_of
from sparcel.wire import Wire


class ByStreams:
    """What `Fused` computes in one pass a phase, step by step; they agree bit for bit.

    Attributes
    ----------
    sent, magnitude
        See `Returned`.
    """

    def __init__(self, addition: Addition, wire: Wire) -> None:
        self._addition, self._wire = addition, wire
        self.sent = 0
        self.magnitude: float | Tensor = 0.0
        self._taken: list[tuple[Phase, int, SparseStream]] = []

    @property
    def applied(self) -> list[Tensor]:
        """See `Returned`. What travels whole is not selected."""
        return [
            phase.regions.coordinates(owner, stream.indices)
            for phase, owner, stream in self._taken
            if self._addition.entering is not None and stream.indices is not None
        ]

    def enter(self, up: Phase) -> dict[int, Message]:
        """Add the gradient to memory, and take out what the other owners get, by owner."""
        regions, x, me = up.regions, self._addition.scratch, self._wire.rank
        *_, finite = kernels.accumulate_topk(self._addition, 0)
        limits = self._limits(up, others=True)
        messages = {}
        for owner in range(regions.ranks):
            if owner == me:
                continue
            region = regions.take(x, owner)
            stream = self._take_out(region, owner, up, limits, finite)
            self.sent += stream.nnz
            messages[owner] = self._pack(region, stream)
            regions.put(x, owner, region)
        return messages

    def collect(self, arrived: Mapping[int, Message], up: Phase, down: Phase) -> Message:
        """Add what arrived to the own region, and take out what all ranks get."""
        regions, x, me = up.regions, self._addition.scratch, self._wire.rank
        region = regions.take(x, me)
        self.magnitude += _magnitude(region)
        flags: list[bool | Tensor] = []
        for source in sorted(arrived):
            expected = Expected(regions.length(me), x.dtype, None)
            stream = self._wire.decode(source, arrived[source], expected)
            flags.append(stream.finite)
            if stream.indices is None:
                region += stream.values
            else:
                kernels.scatter_reduce(region, stream.indices, stream.values, SUM)
        self.magnitude -= _magnitude(region)
        regions.put(x, me, region)
        finite = all_of([*flags, finite_flag(region)])
        stream = self._take_out(region, me, down, self._limits(down, others=False), finite)
        message = self._pack(region, stream)
        regions.put(x, me, region)
        return message

    def deliver(
        self, returned: Mapping[int, Message], down: Phase, divisor: float, out: Tensor | None
    ) -> tuple[SparseStream, int]:
        """Return the average of what the owners returned, and how many coordinates it has."""
        regions, dtype = down.regions, self._addition.gradient.dtype
        indices, values, flags = [], [], []
        for owner in range(regions.ranks):
            expected = Expected(regions.length(owner), self._addition.memory.dtype, None)
            stream = self._wire.decode(owner, returned[owner], expected)
            indices.append(regions.coordinates(owner, _places(stream)))
            values.append(stream.values)
            flags.append(stream.finite)
        places, average = torch.cat(indices), kernels.average(torch.cat(values), divisor).to(dtype)
        finite = all_of([*flags, finite_flag(average)])
        if out is None and down.dense:
            out = self._addition.gradient.new_empty(regions.size)
        if out is not None:
            out.zero_()[places] = average
            return SparseStream.unchecked(None, out, regions.size, finite), average.numel()
        places, order = places.sort()
        places = places.to(kernels.index_dtype(regions.size))
        stream = SparseStream.unchecked(places, average[order], regions.size, finite)
        return stream, average.numel()

    def _limits(self, phase: Phase, others: bool) -> list[tuple[int, Tensor]]:
        """Return where ranges stop, and the bits of the magnitude from which entries travel."""
        regions, me, x = phase.regions, self._wire.rank, self._addition.scratch
        if phase.dense or (others and regions.ranks == 1):
            return []
        place = regions.elsewhere if others else regions.coordinates
        limits, first = [], 0
        for stop, density in phase.shares:
            owned = regions.before(me, stop)
            last = stop - owned if others else owned
            places = sampled_places(last - first, self._wire.step, x.device)
            sample = x[place(me, places + first)]
            limits.append((stop, sampled_threshold(sample, density)))
            first = last
        return limits

    @timed("select")
    def _take_out(
        self,
        region: Tensor,
        owner: int,
        phase: Phase,
        limits: list[tuple[int, Tensor]],
        finite: bool | Tensor,
    ) -> SparseStream:
        """Return what travels of a region, in which it becomes 0."""
        if phase.dense:
            stream = SparseStream.unchecked(None, region.clone(), region.numel(), finite)
            region.zero_()
        else:
            reached, first = [], 0
            bits = kernels.magnitude_bits(region)
            for stop, limit in limits:
                last = phase.regions.before(owner, stop)
                reached.append(bits[first:last] >= limit)
                first = last
            above = torch.where(torch.cat(reached), region, 0)
            indices, values = kernels.threshold_select(above, _SMALLEST[region.dtype])
            most = phase.most[owner]
            indices, values = indices[:most], values[:most]
            kernels.scatter(region, indices, torch.zeros_like(values))
            stream = SparseStream.unchecked(indices, values, region.numel(), finite)
        self._taken.append((phase, owner, stream))
        return stream

    def _pack(self, region: Tensor, stream: SparseStream) -> Message:
        """Return the message of a stream; what rounding takes goes back to its region."""
        self.magnitude += _magnitude(stream.values)
        packet = self._wire.pack(stream)
        for _, lost in self._wire.take_lost():
            self.magnitude -= _magnitude(lost.values)
            if lost.indices is None:
                region += lost.values
            else:
                kernels.scatter(region, lost.indices, lost.values)
        return packet.message


_SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
"""The least magnitudes above 0."""


def _magnitude(values: Tensor) -> float | Tensor:
    """Return the sum of the magnitudes, on a GPU as a tensor."""
    magnitude = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
    return float(magnitude) if magnitude.is_cpu else magnitude


def _places(stream: SparseStream) -> Tensor:
    """Return the places of a stream's values."""
    every = stream.indices
    return torch.arange(stream.size, device=stream.device) if every is None else every


LEAST_SAMPLE, MOST_SAMPLE = 1024, 8192
"""How many coordinates a threshold is estimated from: one in 64, within these bounds. At 10 % the
larger gives a count that is 3 % off, in the mean."""


def sampled_places(count: int, step: int, device: torch.device) -> Tensor:
    """Return the places below ``count`` of which a step takes its sample; all, if there are few.

    They are spread by multiples of the golden section, elsewhere in each step.
    """
    taken = min(count, max(LEAST_SAMPLE, min(MOST_SAMPLE, count // 64)))
    numbers = torch.arange(taken, device=device)
    if taken == count:
        return numbers
    spread = (numbers + step * taken & 0xFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
    return (spread >> 8) * count >> 24


def sampled_threshold(sample: Tensor, density: float) -> Tensor:
    """Return the bits of the magnitude that about ``density`` of the coordinates reach, above 0."""
    bits = kernels.magnitude_bits(sample)
    if bits.numel() == 0:
        return bits.new_ones(())
    k = min(max(int(density * bits.numel() + 0.5), 1), bits.numel())
    return bits.topk(k).values[-1].clamp(min=1)
