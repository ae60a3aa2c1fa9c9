"""The bases of schemes that send a part and remember the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparcel import auto
from sparcel._checks import check_type, checked_filter, number
from sparcel.comm import Communicator
from sparcel.formats import Format, format_named
from sparcel.memory import Memory, Placed, Share, emptied, wide_dtype
from sparcel.ops import SUM
from sparcel.regions import Regions, Shares, exchange_regions, phase
from sparcel.schemes._state import STATE_HINT
from sparcel.schemes.base import Scheme
from sparcel.schemes.density import checked_density, checked_schedule, count_for, front_loaded
from sparcel.schemes.exchange import Exchanged, Selection, magnitude_of
from sparcel.schemes.meter import Meter
from sparcel.schemes.outcome import Reduced
from sparcel.schemes.request import Request
from sparcel.selectors import Selector
from sparcel.selectors import selector as make_selector
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
        self.momentum = number(self.momentum, "momentum", at_least=0, below=1)
        if self.clip is not None:
            self.clip = number(self.clip, "clip", above=0, hint="None clips nothing")
        if self.format != "auto":
            self.format = format_named(self.format)
        self._memory = Memory(self.filter_at(0), self.momentum, self.clip)

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
        scratch: Tensor | None = None,
        in_place: bool = False,
    ) -> Reduced:
        """See `Scheme.reduce`."""
        divisor = request.update_divisor(comm)
        if in_place:
            for start, stop in request.apart:
                gradient[start:stop] = 0
        with emptied(gradient, () if in_place else request.apart):
            if not self._sends_all(request):
                return self._reduce_part(gradient, comm, request, scratch, in_place)
            wire = self._wire(comm, gradient.numel(), gradient.numel())
            if wire.format.loses:
                everything = ((gradient.numel(), 1.0),)
                return self._by_regions(gradient, wire, request, everything, everything, scratch)
            return Reduced(self._sum_all(gradient, wire, request), divisor)

    @abstractmethod
    def _reduce_part(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        scratch: Tensor | None,
        in_place: bool,
    ) -> Reduced:
        """Do what `reduce` does in a step that does not send all."""

    def _take_effect(self, reduced: Reduced) -> None:
        super()._take_effect(reduced)
        beta = self.filter_at(self.steps)
        self._memory.commit(beta, self.factor_at_switch(self._memory.beta, beta))

    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """See `Scheme.coordinates`."""
        return {name: part[start:stop] for name, part in self._memory.coordinates().items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        return super().state_dict() | {"beta": self._memory.beta}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        if "beta" in state:
            checked_filter(state["beta"], "the state's 'beta'", STATE_HINT)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        self._memory.beta = beta = self.filter_at(self.steps)
        self._memory.load(state, self.factor_at_switch(float(state.get("beta", beta)), beta))

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        self._memory.check(gradient)

    def _sends_all(self, request: Request) -> bool:
        """Tell whether this step is uncompressed."""
        return all(density == 1 for *_, density in self._densities(0, request))

    def _sum_all(self, gradient: Tensor, wire: Wire, request: Request) -> SparseStream:
        """Send all of memory + gradient by the engine's own sum, as training without a scheme."""
        meter = request.meter
        with meter.selecting():
            everything = self._memory.accumulate(
                gradient, request.divisor(wire.comm), request.withheld, scale=request.scale
            )
            leaving = magnitude_of(everything)
        meter.asked += request.count(everything.size)
        meter.selected += request.count(everything.size)
        with meter.communicating():
            total = auto.all_reduce(everything, wire, SUM, "dense", everything.size)
            if wire.size == 1:  # the sum is the scratch itself
                total = SparseStream.unchecked(None, total.values.clone(), total.size, total.finite)
        self._memory.take_all()
        meter.magnitude += _unless_void(leaving, total.finite)
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
        meter, comm = request.meter, wire.comm
        value_bytes = wide_dtype(gradient.dtype).itemsize
        regions = Regions.of(gradient.numel(), wire.size)
        sending = phase(regions, up, wire.format, value_bytes)
        returning = phase(regions, down, wire.format, value_bytes)
        meter.asked += min(sum(sending.expected), request.count(gradient.numel()))
        entered = self._memory.entered(
            gradient, request.divisor(comm), request.withheld, scale=request.scale
        )
        with entered as addition, meter.communicating():
            returned = exchange_regions(
                addition,
                wire,
                sending,
                returning,
                request.update_divisor(comm),
                out,
            )
        meter.selected += returned.sent
        meter.magnitude += _unless_void(returned.magnitude, returned.average.finite)
        for coordinates in returned.applied:
            self._memory.forget_velocity(coordinates)
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


def _unless_void(magnitude: float | Tensor, finite: bool | Tensor) -> float | Tensor:
    """Return what a meter counts of a step: nothing if it is void."""
    if isinstance(finite, Tensor):
        return torch.where(finite, magnitude, 0.0)
    return magnitude if finite else 0.0


@dataclass(eq=False)
class Selecting(Sparsifier):
    """A scheme whose ranks select coordinates, which an exchange of streams sums.

    Parameters
    ----------
    selector
        A selector, or a name of `sparcel.selectors.SELECTORS`.

    The others are those of `Sparsifier`.
    """

    selector: str | Selector = "exact"
    _shares: list[Share] = field(default_factory=list, init=False, repr=False)
    _loaded: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selector = make_selector(self.selector)

    def fresh(self) -> Self:
        """See `Scheme.fresh`."""
        assert isinstance(self.selector, Selector), "__post_init__ made one"
        return replace(self, selector=self.selector.fresh())

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        selectors = [share.selector.state_dict() for share in self._shares] or self._loaded
        return super().state_dict() | {"selectors": selectors}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        selectors = state.get("selectors", [])
        check_type(selectors, list, "the state's 'selectors'", STATE_HINT)
        for one in selectors:
            check_type(one, Mapping, "each of the state's 'selectors'", STATE_HINT)
            assert isinstance(self.selector, Selector), "__post_init__ made one"
            self.selector.fresh().load_state_dict(one)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`."""
        super().restore(state)
        self._shares, self._loaded = [], state.get("selectors", [])

    def _reduce_part(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request,
        scratch: Tensor | None,
        in_place: bool,
    ) -> Reduced:
        outcome = self._sum_selected(gradient, comm, request, clear=in_place)
        return Reduced(outcome.total, request.update_divisor(comm), estimates=outcome.estimates)

    def _sum_selected(
        self, gradient: Tensor, comm: Communicator, request: Request, clear: bool
    ) -> Exchanged:
        """Take a selection out of memory + gradient, exchange it, and settle with the memory."""
        meter = request.meter
        self._shares = self._divided(gradient.numel(), request)
        k, most = sum(share.k for share in self._shares), sum(share.most for share in self._shares)
        meter.asked += k
        with meter.selecting():
            taken = self._take(gradient, comm, request, clear)
        wire = self._wire(comm, gradient.numel(), k)
        with meter.communicating():
            selection = Selection(taken, k, most, self._memory.kept)
            outcome = self._exchange(selection, wire)
        meter.selected += outcome.sent.nnz
        lost = self._lost(wire, meter, outcome.total, outcome.magnitude)
        self._memory.settle(lost if outcome.kept is None else [(0, outcome.kept), *lost])
        if self.momentum:
            applied = outcome.applied.indices
            assert applied is not None, "what leaves memory is sparse"
            self._memory.forget_velocity(applied)
        return outcome

    def _lost(
        self, wire: Wire, meter: Meter, total: SparseStream, leaving: float | Tensor
    ) -> Sequence[Placed]:
        """Return what rounding took from this rank, which stays in memory.

        Unless the step is void, the meter counts the magnitude ``leaving``, less what was lost.
        """
        lost = wire.take_lost()
        left = leaving - sum(magnitude_of(stream) for _, stream in lost)
        meter.magnitude += _unless_void(left, total.finite)
        return lost

    def _take(
        self, gradient: Tensor, comm: Communicator, request: Request, clear: bool
    ) -> SparseStream:
        """Take this rank's selection out of memory + gradient; leave the rest in the scratch."""
        return self._memory.select(
            gradient,
            self._shares,
            self.steps,
            request.divisor(comm),
            request.withheld,
            clear,
            request.scale,
        )

    @abstractmethod
    def _exchange(self, selection: Selection, wire: Wire) -> Exchanged:
        """Exchange the ranks' selections; this is where the methods differ."""

    def _divided(self, size: int, request: Request) -> list[Share]:
        """Return the ranges of this step, with the number of coordinates to select from each."""
        ranges = self._densities(size, request)
        selectors = [share.selector for share in self._shares]
        if len(selectors) != len(ranges):
            assert isinstance(self.selector, Selector), "__post_init__ made one"
            selectors = [self.selector.fresh() for _ in ranges]
            for selector, state in zip(selectors, self._loaded, strict=False):
                selector.load_state_dict(state)
        return [
            Share(start, stop, selector, count_for(density, stop - start))
            for (start, stop, density), selector in zip(ranges, selectors, strict=True)
        ]
