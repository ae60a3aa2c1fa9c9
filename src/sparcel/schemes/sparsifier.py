"""What schemes share that send a selection and remember the rest."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from sparcel import collectives
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.memory import Memory, Share
from sparcel.schemes.base import Layer, Scheme
from sparcel.selectors import Selector
from sparcel.selectors import selector as make_selector
from sparcel.stream import SparseStream


@dataclass(eq=False)
class Sparsifier(Scheme):
    """A scheme that sends a selection and remembers the rest.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends, in (0, 1]; 1 sends the whole vector densely.
    selector
        What selects them: a name of `sparcel.selectors.SELECTORS`, or a selector.
    warmup
        Densities before that one, the first for the first ``warmup_steps`` steps, and so on;
        1 for uncompressed steps.
    warmup_steps
        How long each lasts: ``len(loader)`` for one epoch each.
    momentum, clip
        Momentum correction and local gradient clipping, see `sparcel.memory.Memory`. With
        ``momentum`` the optimiser must have none.
    """

    density: float = 0.01
    selector: str | Selector = "exact"
    warmup: Sequence[float] = ()
    warmup_steps: int | None = None
    momentum: float = 0.0
    clip: float | None = None
    _memory: Memory = field(init=False, repr=False)
    _layers: Sequence[Layer] = field(default=(), init=False, repr=False)
    _shares: list[Share] = field(default_factory=list, init=False, repr=False)
    _sent: SparseStream | None = field(default=None, init=False, repr=False)
    _ranks: int = field(default=1, init=False, repr=False)
    _loaded: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_density(self.density)
        check_schedule(self.warmup, self.warmup_steps)
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must lie in [0, 1), got {self.momentum:g}")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be a positive norm, got {self.clip:g}; None clips nothing")
        self.selector = make_selector(self.selector)
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
        self, gradient: Tensor, comm: Communicator, ranks: int | None = None
    ) -> tuple[SparseStream, int]:
        """See `Scheme.reduce`."""
        self._sent, self._ranks = None, ranks or comm.size
        if self._sends_all():
            return self._sum_all(gradient, comm), self._ranks
        self._shares = self._divided(gradient.numel())
        self.cost.asked += self._k
        total = self._sum(gradient, comm)
        if self.momentum and self._sent is not None:
            applied = self._sent.without(self._sent.without(total))
            assert applied.indices is not None, "parts of a stream are sparse"
            self._memory.forget_velocity(applied.indices)
        return total, self._ranks

    def withhold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Scheme.withhold`."""
        self._memory.withheld = ranges

    def divide(self, layers: Sequence[Layer]) -> None:
        """See `Scheme.divide`."""
        self._layers = layers

    def commit(self) -> None:
        """See `Scheme.commit`."""
        super().commit()
        if self.finite:
            self._memory.commit(self.filter_at(self.steps))

    def fresh(self) -> Self:
        """See `Scheme.fresh`."""
        assert isinstance(self.selector, Selector), "made one at the start"
        return replace(self, selector=self.selector.fresh())

    def coordinates(self) -> dict[str, Tensor]:
        """See `Scheme.coordinates`."""
        return self._memory.coordinates()

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        selectors = [share.selector.state_dict() for share in self._shares] or self._loaded
        return super().state_dict() | {"selectors": selectors, "beta": self._memory.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Scheme.load_state_dict`."""
        super().load_state_dict(state)
        self._memory.beta = self.filter_at(self.steps)
        self._memory.load(state)
        self._shares, self._loaded = [], state.get("selectors", [])

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        self._memory.check(gradient)

    @abstractmethod
    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        """Compute into the memory's scratch, exchange, and return the sum over ranks."""

    def _sends_all(self) -> bool:
        """Tell whether this step is uncompressed."""
        return all(density == 1 for *_, density in self._densities(0))

    def _sum_all(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        """Send all of memory and gradient, as training without a scheme does."""
        with self.cost.selecting():
            everything = self._memory.accumulate(gradient, self._ranks)
        self.cost.asked += everything.size
        self.cost.selected += everything.size
        with self.cost.communicating():
            total = collectives.all_reduce(everything, comm, algorithm="dense")
        self._memory.take_all()
        return total

    def _select(self, gradient: Tensor) -> SparseStream:
        with self.cost.selecting():
            sent = self._memory.select(gradient, self._shares, self.steps, self._ranks)
        self.cost.selected += sent.nnz
        self._sent = sent
        return sent

    @property
    def _k(self) -> int:
        """How many coordinates the density asks for in this step."""
        return sum(share.k for share in self._shares)

    @property
    def _most(self) -> int:
        """The most coordinates that a rank can send in this step."""
        return sum(share.most for share in self._shares)

    def _divided(self, size: int) -> list[Share]:
        """Return what is selected of which coordinates in this step."""
        layers = self._densities(size)
        selectors = [share.selector for share in self._shares]
        if len(selectors) != len(layers):
            assert isinstance(self.selector, Selector), "made one at the start"
            selectors = [self.selector.fresh() for _ in layers]
            for selector, state in zip(selectors, self._loaded, strict=False):
                selector.load_state_dict(state)
        return [
            Share(start, stop, selector, count_for(density, stop - start))
            for (start, stop, density), selector in zip(layers, selectors, strict=True)
        ]

    def _densities(self, size: int) -> list[tuple[int, int, float]]:
        """Return the layers, or the whole vector, with their densities in this step."""
        density = self._density_at(self.steps)
        least = density if self.steps < len(self.warmup) * (self.warmup_steps or 0) else 0.0
        layers = self._layers or [(0, size, None)]
        return [(start, stop, max(own or density, least)) for start, stop, own in layers]

    def _density_at(self, step: int) -> float:
        entry = step // (self.warmup_steps or 1)
        return self.warmup[entry] if entry < len(self.warmup) else self.density


def check_schedule(densities: Sequence[float], steps: int | None) -> None:
    """Raise `InputError` unless these are densities that each last so many steps."""
    if not isinstance(densities, Sequence):
        raise InputError(f"warmup must be a list of densities, got {densities!r}")
    for density in densities:
        check_density(density)
    if densities and not (isinstance(steps, int) and steps >= 1):
        raise InputError(
            f"warmup={list(densities)} needs warmup_steps, the steps that each density lasts, got"
            f" {steps}; for one epoch each pass warmup_steps=len(loader)"
        )


def check_density(density: float) -> None:
    """Raise `InputError` unless ``density`` lies in (0, 1]."""
    if not 0 < density <= 1:
        percentage = 1 < density <= 100
        hint = f"; for a percentage pass density={density / 100:g}" if percentage else ""
        raise InputError(f"density must lie in (0, 1], got {density:g}{hint}")


def count_for(density: float, size: int) -> int:
    """Return how many of ``size`` coordinates a density asks for: max(1, ⌈density·n⌉)."""
    return max(1, math.ceil(density * size))
