"""Schemes that send a part and remember the rest: their base, and the default, by regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core import auto
from sparcel.core._checks import checked_number
from sparcel.core.comm import Communicator
from sparcel.core.formats import Format, format_named
from sparcel.core.kernels import Densities, Regions
from sparcel.core.memory import Entering, Memory, emptied
from sparcel.core.ops import SUM
from sparcel.core.regions import RETURNED, exchange_regions, leg
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.density import (
    checked_density,
    checked_schedule,
    count_for,
    front_loaded,
)
from sparcel.core.schemes.step import Outcome, Plan, Request, Span, Step, averaged, magnitude_of
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire


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
        Momentum correction, in [0, 1), see `sparcel.schemes.Memory`. The optimiser must
        then have none.
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
    @override
    def memory(self) -> Tensor | None:
        return self._memory.residual

    @property
    @override
    def remembers(self) -> tuple[str, ...]:
        return ("memory", "velocity") if self.momentum else ("memory",)

    @property
    @override
    def holds_back(self) -> bool:
        return self.density < 1

    def _plan_terms(self, gradient: Tensor, request: Request) -> object:
        era = None
        if self.warmup:
            era = min(self.steps // (self.warmup_steps or 1), len(self.warmup))
        elif request.front_loaded:  # densities of the first steps change at powers of two
            era = (self.steps + 1).bit_length()
        return era, self._memory.dtype(gradient)

    def _planned(self, gradient: Tensor, comm: Communicator, request: Request) -> Plan:
        size = gradient.numel()
        spans = tuple(
            Span(start, stop, density, count_for(density, stop - start))
            for start, stop, own in request.layers or [(0, size, None)]
            for density in [self._density_now(own, request)]
        )
        k = size if sends_all(spans) else sum([span.k for span in spans])
        format, up, down = self.format, None, None
        if not isinstance(format, Format):  # "auto"
            format = auto.fastest_format(size, k, comm.rates)
        asked, coordinates = k, request.count(size)
        facts: dict[str, object] = {}
        if legs := self._up_and_down(spans, format):
            regions = Regions.of(size, comm.size)
            dtype = self._memory.dtype(gradient)
            up, down = [leg(regions, shares, coded, dtype) for shares, coded in legs]
            asked = min(sum(up.expected), coordinates)
            facts = {"memory": dtype, "up": legs[0], "down": legs[1]}
        elif sends_all(spans):
            asked = coordinates
        call = self._call(gradient, comm, request, facts)
        return Plan(call, request.divisor(comm), coordinates, asked, spans, format, up, down)

    def _up_and_down(
        self, spans: Sequence[Span], format: Format
    ) -> tuple[Travelling, Travelling] | None:
        """Return what travels up and down of a vector's ranges, if a step goes by regions.

        One that sends all does if its format rounds.
        """
        if not (sends_all(spans) and format.loses):
            return None
        everything = ((spans[-1].stop, 1.0),), format
        return everything, everything

    @override
    def reduce(self, step: Step) -> Outcome:
        exchange = self._by_streams if step.plan.up is None else self._by_regions
        gradient, apart = step.gradient, step.request.apart
        if step.out is not gradient:
            with emptied(gradient, apart):
                return exchange(step)
        if apart:
            torch._foreach_zero_([gradient[start:stop] for start, stop in apart])
        return exchange(step)

    def _take_effect(self) -> None:
        super()._take_effect()
        self._memory.commit()

    @override
    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        return {name: part[start:stop] for name, part in self._memory.coordinates().items()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._memory.load(state)

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        self._memory.check(gradient)

    def _by_streams(self, step: Step) -> Outcome:
        """Send all of memory + gradient by the engine's own sum, as training without a scheme."""
        gradient, comm, request, plan, out = step
        with request.costs.selecting():
            everything = self._memory.accumulate(entering(step))
            leaving = magnitude_of(everything)
        with request.costs.communicating():
            total = auto.all_reduce(everything, self._wire(step), SUM, "dense", everything.size)
            if comm.size == 1:  # the sum is the scratch itself
                total = SparseStream.unchecked(None, total.values.clone(), total.size, total.finite)
        self._memory.kept.zero_()
        average = averaged(total, plan.ranks / request.scale, gradient.dtype, out)
        sent = plan.coordinates
        return Outcome(average, average.finite, sent, total.nnz, (leaving,), sent, sent)

    def _by_regions(self, step: Step) -> Outcome:
        """Send shares of memory + gradient to the owners of regions, who return shares of sums."""
        _, comm, request, plan, out = step
        assert plan.up is not None and plan.down is not None, "reduce asked"
        divisor = plan.ranks / request.scale
        with self._memory.entered(entering(step)) as addition, request.costs.communicating():
            returned = exchange_regions(
                addition, comm, self.steps, plan.up, plan.down, divisor, out
            )
        return Outcome(*returned, plan.coordinates, plan.asked)

    def _wire(self, step: Step) -> Wire:
        """Return what carries the step's streams."""
        return Wire(step.comm, step.plan.format, self.steps)

    def _density_now(self, own: float | None, request: Request) -> float:
        """Return the density of a layer in this step; ``own`` is its own, if it has one."""
        entry = self.steps // (self.warmup_steps or 1)
        if entry < len(self.warmup):
            return max(own or 0.0, self.warmup[entry])
        density = own or self.density
        in_front = request.front_loaded and not self.warmup
        return front_loaded(density, self.steps) if in_front else density


def entering(step: Step, clear: bool = False) -> Entering:
    """Return what enters the memory; ``clear`` sets the gradient to zero as it is read."""
    gradient, _, request, plan, _ = step
    return Entering(gradient, plan.ranks, request.withheld, clear, request.scale)


Travelling = tuple[Densities, Format]
"""How much of a vector's ranges travels in a leg, and in which format."""


def sends_all(spans: Sequence[Span]) -> bool:
    """Tell whether a step is uncompressed."""
    return all(span.density == 1 for span in spans)


@dataclass(eq=False)
class Bidirectional(Sparsifier):
    """Ranks send their largest coordinates to the owners of regions, who return their largest sums.

    Each rank owns a part of the vector, in interleaved blocks. It adds what the other ranks send of
    it to all that it has of it itself, and returns the largest of these sums to all ranks. What a
    rank does not send, what an owner does not return, and what rounding takes stays in its memory.
    Two exchanges do all, whatever the number of ranks.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends of each region, about: those above a threshold
        that is estimated from a sample. 1 sends all, in the format's bits.
    returned
        Share of its sums that an owner returns, about, at least ``density``: by default three times
        as much. 1 returns all, in the format's bits, so that what any rank has sent is applied.
    answer
        How what owners return travels, by name or as a `Format`; by default as what they are sent.
        It is worth more bits where the ranks' gradients are alike.

    The others are those of `Sparsifier`. Layers with densities of their own return as many times
    as much.
    Source: errors are fed back in both directions as in DoubleSqueeze (Tang et al. 2019), with
    ranks as the servers of regions as in 1-bit Adam (Tang et al. 2021). With ``returned=density``
    it is near Ok-Topk's rule, with a share for each owner in place of the k largest of all.
    """

    returned: float | None = None
    answer: str | Format | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer is not None:
            self.answer = format_named(self.answer, "answer")
        if self.returned is not None:
            self.returned = checked_number(
                self.returned, "returned", at_least=self.density, at_most=1, hint="1 returns all"
            )

    def _up_and_down(
        self, spans: Sequence[Span], format: Format
    ) -> tuple[Travelling, Travelling] | None:
        answer = self.answer if isinstance(self.answer, Format) else format
        if sends_all(spans):
            if not (format.loses or answer.loses):
                return None
            everything = ((spans[-1].stop, 1.0),)
            return (everything, format), (everything, answer)
        times = RETURNED if self.returned is None else self.returned / self.density
        up = tuple((span.stop, span.density) for span in spans)
        down = tuple((stop, min(1.0, density * times)) for stop, density in up)
        return (up, format), (down, answer)
