"""What all schemes share: a step as a transaction, the update, state, and what a step costs."""

from __future__ import annotations

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
from sparcel.stream import SparseStream

Layer = tuple[int, int, float | None]
"""``(start, stop, density)``: consecutive coordinates with a density of their own, or the scheme's
where it is None."""


@dataclass
class Cost:
    """What the steps of a scheme cost on this rank so far.

    ``asked``, ``selected`` and ``reduced`` count the coordinates that the density asks for, that
    were sent, and that came back, ``coordinates`` all there are, each summed over the steps.
    """

    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    asked: int = 0
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

    @property
    def owed(self) -> Tensor | None:
        """What this rank still owes to the updates: the memory, or memory/β where a filter is."""
        memory, beta = self.memory, self.filter_at(self.steps)
        return memory if memory is None or beta == 1 else memory / beta

    @property
    def chosen(self) -> str | None:
        """The method that a scheme which chooses took last; None before, and for the others."""
        return None

    def filter_at(self, step: int) -> float:
        """Return the memory's low-pass filter β (ScaleCom) in a step; 1 is none."""
        return 1.0

    @property
    def remembers(self) -> tuple[str, ...]:
        """The names of what `coordinates` holds after a step; empty for a dense scheme."""
        return ()

    def step(self, gradient: Tensor, comm: Group = None, out: Tensor | None = None) -> Tensor:
        """Return the average over ranks of what the scheme lets through, and commit.

        Parameters
        ----------
        gradient
            ``[size]``, contiguous, any float dtype. Left as it was, unless it is also ``out``.
        comm
            A sparcel communicator, a torch process group, an MPI communicator, or None for torch's
            default group; all its ranks call.
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

    def prepare(self, comm: Communicator) -> None:  # noqa: B027
        """Do, inside a job of ``comm``, what is done once for all steps and all schemes like this.

        Otherwise the first step does it.
        """

    def sends_whole(self, gradient: Tensor, comm: Communicator) -> bool:
        """Settle, inside a job of ``comm``, whether the next step sends ``gradient`` as it is.

        It then selects nothing and remembers nothing, so that drivers may leave in the vector what
        they would send densely otherwise. All ranks get the same answer.
        """
        return False

    def begin(self, gradient: Tensor, comm: Communicator, out: Tensor | None = None) -> Tensor:
        """Do the step but for `commit`, inside a job of ``comm``.

        For drivers of several vectors, which commit all of them or none.
        """
        update = update_like(gradient, out)
        total, divisor = self.reduce(gradient, comm)
        self.cost.coordinates += total.size
        self.cost.reduced += total.nnz
        self.finite = total.finite and write_average(total, divisor, update)
        return update if self.finite else update.fill_(float("nan"))

    @abstractmethod
    def reduce(
        self, gradient: Tensor, comm: Communicator, ranks: int | None = None
    ) -> tuple[SparseStream, int]:
        """Exchange, and return a sum, the same on all ranks, with the divisor of the average.

        For schemes that are made of other schemes; `commit` is due as after `begin`. ``ranks`` is
        how many the average is over, where ``gradient`` is a sum of several ranks'.
        """

    def withhold(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Send nothing of these ranges ``[start, stop)`` in the next step, nor forget it.

        The gradient must be zero there. For drivers that cannot deliver an update to all
        coordinates.
        """

    def divide(self, layers: Sequence[Layer]) -> None:  # noqa: B027
        """Give ranges of the vector densities of their own, from now on.

        ``layers`` follow each other and cover the whole vector.
        """

    def commit(self) -> None:
        """Make the last step begun count, unless a vector was not finite."""
        self.steps += self.finite

    def fresh(self) -> Self:
        """Return a scheme with the same settings and nothing remembered."""
        return replace(self)

    def coordinates(self) -> dict[str, Tensor]:
        """Return what is remembered of every coordinate, by name, ``[size]`` each; not copies."""
        return {}

    def coordinates_in(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what is remembered of the coordinates ``[start, stop)``, by name."""
        return {name: part[start:stop] for name, part in self.coordinates().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on, copies: the residual, the steps done."""
        copies = {name: part.clone() for name, part in self.coordinates().items()}
        return {"steps": self.steps, "memory": None, **copies}

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
