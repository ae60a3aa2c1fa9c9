"""What all schemes share: a step as a transaction, the update, state, and what a step costs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import FLOAT_DTYPES, all_finite
from sparcel.comm import Communicator, Group, resolve
from sparcel.errors import InputError
from sparcel.memory import Memory
from sparcel.stream import SparseStream


@dataclass
class Cost:
    """What the steps of a scheme cost on this rank so far.

    ``selected`` and ``reduced`` count the coordinates that were sent and that came back,
    ``coordinates`` all there are, each summed over the steps.
    """

    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    selected: int = 0
    reduced: int = 0
    coordinates: int = 0

    @contextmanager
    def selecting(self) -> Iterator[None]:
        """Add the time of the block to ``select_seconds``."""
        start = perf_counter()
        yield
        self.select_seconds += perf_counter() - start

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Add the time of the block to ``communicate_seconds``."""
        start = perf_counter()
        yield
        self.communicate_seconds += perf_counter() - start


@dataclass(eq=False)
class Scheme(ABC):
    """Turns the gradients of all ranks into one update, the same on all ranks.

    A scheme serves one vector: its memory is that vector's. `fresh` makes another one with the
    same settings.
    """

    cost: Cost = field(default_factory=Cost, init=False, repr=False)
    steps: int = field(default=0, init=False, repr=False)
    finite: bool = field(default=True, init=False, repr=False)
    """Whether the vectors of all ranks were finite in the last step begun."""

    @property
    def memory(self) -> Tensor | None:
        """The residual, float32 or float64 ``[size]``; None before the first step, or for good.

        It is for inspection: the tensor serves as scratch in the step after next, so clone it to
        keep it.
        """
        return None

    def step(self, gradient: Tensor, comm: Group = None, out: Tensor | None = None) -> Tensor:
        """Return the average over ranks of what the scheme lets through, and commit.

        Parameters
        ----------
        gradient
            ``[size]``, contiguous, any float dtype. Left as it was, unless it is also ``out``.
        comm
            A sparcel communicator, a torch process group, or None for torch's default group; all
            its ranks call.
        out
            Where to write the update; a new tensor like ``gradient`` by default.

        Returns
        -------
        Tensor
            ``[size]``, the gradient's dtype. All NaN where any rank's vector was not finite, or
            the average is not; the memory then stays as it was.

        Raises
        ------
        InputError, MismatchError, CommunicationError
            The memory stays as it was.
        """
        gradient, ranks = gradient.detach(), resolve(comm)
        self._check(gradient)
        update = update_like(gradient, out)

        def job() -> None:
            self._agree(gradient, ranks)
            self.begin(gradient, ranks, update)

        ranks.run(job)
        self.commit()
        return update

    @abstractmethod
    def begin(self, gradient: Tensor, comm: Communicator, out: Tensor | None = None) -> Tensor:
        """Do the step but for `commit`, inside a job of ``comm``.

        For drivers of several vectors, which commit all of them or none.
        """

    def withhold(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Send nothing of these ranges ``[start, stop)`` in the next step, nor forget it.

        The gradient must be zero there. For drivers that cannot deliver an update to all
        coordinates.
        """

    def commit(self) -> None:
        """Make the last step begun count, unless a vector was not finite."""
        self.steps += self.finite

    def fresh(self) -> Self:
        """Return a scheme with the same settings and nothing remembered."""
        return replace(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on: a copy of the residual, and the steps done."""
        memory = self.memory
        return {"steps": self.steps, "memory": None if memory is None else memory.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; tensors are copied."""
        self.steps = state["steps"]

    def _check(self, gradient: Tensor) -> None:
        """Raise `InputError` unless a step can take ``gradient``."""
        if gradient.ndim != 1 or gradient.dtype not in FLOAT_DTYPES or not gradient.is_contiguous():
            raise InputError(
                f"a gradient is a contiguous one-dimensional float tensor, got {gradient.dtype} of"
                f" shape {tuple(gradient.shape)}, strides {gradient.stride()}; flatten it first"
            )

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:  # noqa: B027
        """Compare the ranks' gradients, for a scheme whose exchange would not."""


@dataclass(eq=False)
class Sparsifier(Scheme):
    """A scheme that sends a selection and remembers the rest."""

    _memory: Memory = field(default_factory=Memory, init=False, repr=False)

    @property
    def memory(self) -> Tensor | None:
        """See `Scheme.memory`."""
        return self._memory.residual

    def begin(self, gradient: Tensor, comm: Communicator, out: Tensor | None = None) -> Tensor:
        """See `Scheme.begin`."""
        update = update_like(gradient, out)
        total = self._sum(gradient, comm)
        self.cost.coordinates += total.size
        self.cost.reduced += total.nnz
        self.finite = total.finite and write_average(total, comm.size, update)
        return update if self.finite else update.fill_(float("nan"))

    def withhold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Scheme.withhold`."""
        self._memory.withheld = ranges

    def commit(self) -> None:
        """See `Scheme.commit`."""
        super().commit()
        if self.finite:
            self._memory.commit()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Scheme.load_state_dict`."""
        super().load_state_dict(state)
        self._memory.load(state["memory"])

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        self._memory.check(gradient)

    @abstractmethod
    def _sum(self, gradient: Tensor, comm: Communicator) -> SparseStream:
        """Compute into the memory's scratch, exchange, and return the sum over ranks."""

    def _select(self, gradient: Tensor, k: int, chunk: int | None = None) -> SparseStream:
        with self.cost.selecting():
            stream = self._memory.select(gradient, k, chunk)
        self.cost.selected += stream.nnz
        return stream


def write_average(total: SparseStream, ranks: int, update: Tensor) -> bool:
    """Write ``total / ranks`` and tell whether it is finite, in the dtype of ``update`` too.

    All ranks find the same, since ``total`` is the same on all of them.
    """
    if total.indices is None:
        return all_finite(torch.div(total.values, ranks, out=update))
    average = (total.values / ranks).to(update.dtype)
    kernels.scatter(update.zero_(), total.indices, average)
    return all_finite(average)


def update_like(gradient: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, checked, or a new tensor like ``gradient``."""
    if out is None:
        return torch.empty_like(gradient)
    if (out.shape, out.dtype, out.device) != (gradient.shape, gradient.dtype, gradient.device):
        raise InputError(
            f"out must be like the gradient, {gradient.dtype} of shape {tuple(gradient.shape)} on"
            f" {gradient.device}, got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    if not out.is_contiguous():
        raise InputError(f"out must be contiguous, got strides {out.stride()}")
    return out


def check_density(density: float) -> None:
    """Raise `InputError` unless ``density`` lies in (0, 1]."""
    if not 0 < density <= 1:
        percentage = 1 < density <= 100
        hint = f"; for a percentage pass density={density / 100:g}" if percentage else ""
        raise InputError(f"density must lie in (0, 1], got {density:g}{hint}")


def count_for(density: float, size: int) -> int:
    """Return how many of ``size`` coordinates a density asks for: max(1, ⌈density·n⌉)."""
    return max(1, math.ceil(density * size))
