"""The base of schemes that send a part and remember the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparcel import auto
from sparcel._checks import checked_number
from sparcel.comm import Communicator
from sparcel.formats import Format, format_named
from sparcel.memory import Memory, emptied, wide_dtype
from sparcel.ops import SUM
from sparcel.regions import Regions, Shares, exchange_regions, phase
from sparcel.schemes.base import Scheme
from sparcel.schemes.density import checked_density, checked_schedule, front_loaded
from sparcel.schemes.ledger import magnitude_of
from sparcel.schemes.outcome import Reduced
from sparcel.schemes.request import Request
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(eq=False)
class Sparsifier(Scheme):
    """A scheme that sends a part of memory + gradient and remembers the rest.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends, in (0, 1]; 1 sends the whole vector densely.
    warmup
        Densities of the first steps: the first density for ``warmup_steps`` steps, then the second,
        and so on. 1 means uncompressed steps.
    warmup_steps
        How many optimiser steps each of them lasts: ``len(loader)`` for one epoch each. If a step
        accumulates the gradients of several batches, divide by their number. Backward passes that
        exchange nothing, as under DDP's ``no_sync()``, are no steps, nor are those with NaN or Inf.
    momentum
        Momentum correction, in [0, 1), see `sparcel.memory.Memory`. The optimiser must then have
        none.
    clip
        The largest norm of the average: a rank's gradient is clipped at ``clip·√P`` before it
        enters the memory. With ``momentum``, use it instead of clipping the update: an update holds
        the gradients of many steps, and what is clipped off it is lost, while the velocity and the
        memory take it as applied.
    format
        How selections and sums travel, by name or as a `Format`: ``"raw"``, ``"packed"``, or one
        that rounds values, such as ``"packed:4"``. What rounding takes goes to the memory of the
        rank that rounds. Uncompressed steps are rounded too. ``"auto"`` is the exact format that is
        predicted to take the least time.
    """

    density: float = 0.01
    warmup: Sequence[float] = ()
    warmup_steps: int | None = None
    momentum: float = 0.0
    clip: float | None = None
    format: str | Format = "raw"
    _memory: Memory = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.density = checked_density(self.density)
        self.warmup, self.warmup_steps = checked_schedule(self.warmup, self.warmup_steps)
        self.momentum = checked_number(self.momentum, "momentum", at_least=0, below=1)
        if self.clip is not None:
            self.clip = checked_number(self.clip, "clip", above=0, hint="None clips nothing")
        if self.format != "auto":
            self.format = format_named(self.format)
        self._memory = Memory(self.momentum, self.clip)

    @property
    def memory(self) -> Tensor | None:
        """See `Scheme.memory`."""
        return self._memory.residual

    @property
    def remembers(self) -> tuple[str, ...]:
        """See `Scheme.remembers`."""
        return ("memory", "velocity") if self.momentum else ("memory",)

    def reduce(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        out: Tensor | None = None,
    ) -> Reduced:
        """See `Scheme.reduce`."""
        in_place = out is gradient
        if in_place:
            for start, stop in request.apart:
                gradient[start:stop] = 0
        with emptied(gradient, () if in_place else request.apart):
            if not self._sends_all(request):
                return self._reduce_part(gradient, comm, request, out)
            wire = self._wire(comm, gradient.numel(), gradient.numel())
            if wire.format.loses:
                everything = ((gradient.numel(), 1.0),)
                return self._by_regions(gradient, wire, request, everything, everything, out)
            return Reduced(self._sum_all(gradient, wire, request), request.update_divisor(comm))

    @abstractmethod
    def _reduce_part(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        out: Tensor | None,
    ) -> Reduced:
        """Do what `reduce` does in a step that does not send all."""

    def _take_effect(self) -> None:
        super()._take_effect()
        self._memory.commit()

    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """See `Scheme.coordinates`."""
        return {name: part[start:stop] for name, part in self._memory.coordinates().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        self._memory.load(state)

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        self._memory.check(gradient)

    def _sends_all(self, request: Request) -> bool:
        """Tell whether this step is uncompressed."""
        return all(density == 1 for *_, density in self._densities(0, request))

    def _sum_all(self, gradient: Tensor, wire: Wire, request: Request) -> SparseStream:
        """Send all of memory + gradient by the engine's own sum, as training without a scheme."""
        costs = request.costs
        with costs.selecting():
            everything = self._memory.accumulate(
                gradient, request.divisor(wire.comm), request.withheld, scale=request.scale
            )
            leaving = magnitude_of(everything)
        costs.asked += request.count(everything.size)
        costs.selected += request.count(everything.size)
        with costs.communicating():
            total = auto.all_reduce(everything, wire, SUM, "dense", everything.size)
            if wire.size == 1:  # the sum is the scratch itself
                total = SparseStream.unchecked(None, total.values.clone(), total.size, total.finite)
        self._memory.kept.zero_()
        costs.magnitude += unless_void(leaving, total.finite)
        return total

    def _by_regions(
        self,
        gradient: Tensor,
        wire: Wire,
        request: Request,
        up: Shares,
        down: Shares,
        out: Tensor | None,
    ) -> Reduced:
        """Send shares of memory + gradient to the owners of regions, who return shares of sums."""
        costs, comm = request.costs, wire.comm
        dtype = wide_dtype(gradient.dtype)
        regions = Regions.of(gradient.numel(), wire.size)
        sending = phase(regions, up, wire.format, dtype)
        returning = phase(regions, down, wire.format, dtype)
        costs.asked += min(sum(sending.expected), request.count(gradient.numel()))
        entered = self._memory.entered(
            gradient, request.divisor(comm), request.withheld, scale=request.scale
        )
        with entered as addition, costs.communicating():
            returned = exchange_regions(
                addition,
                wire,
                sending,
                returning,
                request.update_divisor(comm),
                out,
            )
        costs.selected += returned.sent
        costs.magnitude += unless_void(returned.magnitude, returned.average.finite)
        return Reduced(returned.average, None, entries=returned.entries)

    def _wire(self, comm: Communicator, size: int, k: int) -> Wire:
        """Return what carries ``k`` of ``size`` coordinates in this step."""
        return Wire(comm, self.format_for(size, k, comm), self.steps)

    def format_for(self, size: int, k: int, comm: Communicator) -> Format:
        """Return the format in which ``k`` of ``size`` coordinates travel."""
        if isinstance(self.format, Format):
            return self.format
        return auto.fastest_format(size, k, comm.rates)

    def _densities(self, size: int, request: Request) -> list[tuple[int, int, float]]:
        """Return the layers, or the whole vector, with their densities in this step."""
        return [
            (start, stop, self._density_now(own, request))
            for start, stop, own in request.layers or [(0, size, None)]
        ]

    def _density_now(self, own: float | None, request: Request) -> float:
        """Return the density of a layer in this step; ``own`` is its own, if it has one."""
        entry = self.steps // (self.warmup_steps or 1)
        if entry < len(self.warmup):
            return max(own or 0.0, self.warmup[entry])
        density = own or self.density
        in_front = request.front_loaded and not self.warmup
        return front_loaded(density, self.steps) if in_front else density


def unless_void(magnitude: float | Tensor, finite: bool | Tensor) -> float | Tensor:
    """Return what the costs count of a step: nothing if it is void."""
    if isinstance(finite, Tensor):
        return torch.where(finite, magnitude, 0.0)
    return magnitude if finite else 0.0
