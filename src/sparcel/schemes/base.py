"""The base of all schemes: a step as a transaction, the update, and the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import FLOAT_DTYPES, all_finite, check_like, check_type
from sparcel.comm import Call, Communicator, Group, resolve
from sparcel.errors import InputError
from sparcel.profiling import profiled
from sparcel.schemes._state import STATE_HINT, check_memory
from sparcel.schemes.request import Request
from sparcel.stream import SparseStream


@dataclass(eq=False)
class Scheme(ABC):
    """Turns the gradients of all ranks into one update, the same on all ranks.

    A scheme serves one vector, because it remembers what that vector has not sent yet. `fresh`
    makes another scheme with the same settings.
    """

    steps: int = field(default=0, init=False, repr=False)
    """How many steps have taken effect."""
    finite: bool = field(default=True, init=False, repr=False)
    """Whether the vectors of all ranks were finite in the last step begun."""
    sent_whole: bool = field(default=False, init=False, repr=False)
    """Whether the last step begun sent the gradient as it is, with what `Request.apart` names."""
    _agreed: bool = field(default=False, init=False, repr=False)
    """Whether the ranks' gradients were compared in a step that a driver began."""

    @property
    def memory(self) -> Tensor | None:
        """The residual, float32 or float64 ``[size]``; None if there is none.

        The step after next overwrites the tensor, so clone it to keep it.
        """
        return None

    @property
    def owed(self) -> Tensor | None:
        """What this rank still owes to the updates: the memory, or memory/β under a filter."""
        return self.memory

    @property
    def remembers(self) -> tuple[str, ...]:
        """The names of what `coordinates` holds after a step; empty for a dense scheme."""
        return ()

    def step(
        self,
        gradient: Tensor,
        comm: Group = None,
        out: Tensor | None = None,
        request: Request | None = None,
    ) -> Tensor:
        """Return the average over ranks of the coordinates that the scheme sends, and commit.

        Parameters
        ----------
        gradient
            ``[size]``, contiguous, any float dtype. Left as it was, unless it is also ``out``: the
            step then clears it as it reads it, so after an error it may hold anything.
        comm
            A sparcel communicator, a torch process group, an MPI communicator, or None for torch's
            default group; all its ranks call.
        out
            Where to write the update; a new tensor like ``gradient`` by default.
        request
            Settings of this step.

        Returns
        -------
        Tensor
            ``[size]``, the gradient's dtype. All NaN if any rank's vector or the average is not
            finite; the memory then stays as it was.

        Raises
        ------
        InputError, MismatchError, CommunicationError
            The memory stays as it was.
        """
        ranks = resolve(comm)
        self._check(gradient)
        update = update_like(gradient.detach(), out)
        self._transact(gradient.detach(), ranks, request, update)
        return update

    def step_stream(
        self, gradient: Tensor, comm: Group = None, request: Request | None = None
    ) -> SparseStream:
        """Do a step and return its update as a stream, for optimisers that apply it sparsely.

        Parameters and errors are those of `step`.

        Returns
        -------
        SparseStream
            The coordinates that came back, in the gradient's dtype; sparse unless their sum became
            dense. Empty and not ``finite`` if any rank's vector or the average is not finite; the
            memory then stays as it was.
        """
        ranks = resolve(comm)
        self._check(gradient)
        return self._transact(gradient.detach(), ranks, request, None)

    def begin(
        self,
        gradient: Tensor,
        comm: Communicator,
        request: Request | None = None,
        out: Tensor | None = None,
    ) -> SparseStream:
        """Do the step except for `commit`, inside a job of ``comm``; return `step_stream`'s stream.

        For drivers of several vectors, which commit all of them or none. The update is also
        written to ``out``, if given, as `step` does; a dense stream then shares its storage. The
        ranks' gradients are compared in this scheme's first step only, also if it has loaded a
        state, where an exchange alone would not.
        """
        request = request or Request()

        def job() -> SparseStream:
            if not self._agreed:
                self._agree(gradient, comm)
                self._agreed = True
            return self._begin(gradient, comm, request, out)

        return comm.call(self._call(gradient, comm, request), job)

    def _begin(
        self, gradient: Tensor, comm: Communicator, request: Request, out: Tensor | None
    ) -> SparseStream:
        if out is not None and out.data_ptr() == gradient.data_ptr():
            out = gradient  # so that it is cleared as it is read
        total, divisor = self.reduce(gradient, comm, request, out)
        coordinates = total.size if self.sent_whole else request.count(total.size)
        request.meter.coordinates += coordinates
        request.meter.reduced += min(total.nnz, coordinates)
        with profiled("update"):
            average = averaged(total, divisor, gradient.dtype, out)
            self.finite = bool(average.finite)
            if out is not None:
                _write(average, out, cleared=out is gradient)
        return average

    @abstractmethod
    def reduce(
        self, gradient: Tensor, comm: Communicator, request: Request, scratch: Tensor | None = None
    ) -> tuple[SparseStream, int]:
        """Exchange, and return a sum, the same on all ranks, with the divisor of the average.

        For schemes that are made of other schemes; `commit` follows as after `begin`. The sum may
        use ``scratch``, a tensor like ``gradient``, as its storage. If ``scratch`` is the gradient
        itself and the sum is sparse, the gradient is zero afterwards.
        """

    def commit(self) -> None:
        """Make the last step begun take effect, unless a vector was not finite."""
        self.steps += self.finite

    def fresh(self) -> Self:
        """Return a scheme with the same settings and nothing remembered."""
        return replace(self)

    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the state of the coordinates ``[start, stop)``, by name, without copying."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state that a later run needs: the memory, the number of steps."""
        copies = {name: part.clone() for name, part in self.coordinates().items()}
        return {"steps": self.steps, "memory": None, **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; tensors are copied.

        Raises
        ------
        InputError
            When an entry is missing, or has a value that such a scheme would not have saved;
            nothing changes then.
        """
        check_type(state, Mapping, "state", STATE_HINT)
        self._check_state(state)
        self.restore(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `InputError` unless the scheme can go on from a state."""
        check_memory(state, repr(self), self.remembers)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was checked already."""
        self.steps = int(state["steps"])

    def _transact(
        self, gradient: Tensor, comm: Communicator, request: Request | None, out: Tensor | None
    ) -> SparseStream:
        """Begin a step in a job of ``comm``, and commit it."""
        request = request or Request()
        check_type(request, Request, "request")

        def job() -> SparseStream:
            self._agree(gradient, comm)
            return self._begin(gradient, comm, request, out)

        average = comm.call(self._call(gradient, comm, request), job)
        self.commit()
        return average

    def _call(self, gradient: Tensor, comm: Communicator, request: Request) -> Call:
        """Describe a step by the settings that all ranks must share."""
        facts: dict[str, object] = {"size": gradient.numel(), "dtype": gradient.dtype}
        facts["divisor"] = request.divisor(comm)
        # Ranks that loaded states of different steps, or only some of which loaded one, differ.
        return Call.of(f"{self!r}.step", {**facts, "step": self.steps})

    def _check(self, gradient: Tensor) -> None:
        """Raise `InputError` unless a step can take ``gradient``."""
        check_type(gradient, Tensor, "gradient")
        if gradient.ndim != 1 or gradient.dtype not in FLOAT_DTYPES or not gradient.is_contiguous():
            raise InputError(
                f"a gradient is a contiguous one-dimensional float tensor, got {gradient.dtype} of"
                f" shape {tuple(gradient.shape)}, strides {gradient.stride()}; flatten it first"
            )

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:  # noqa: B027
        """Compare the ranks' gradients, in a scheme whose exchange does not."""


def averaged(
    total: SparseStream, divisor: int, dtype: torch.dtype, out: Tensor | None = None
) -> SparseStream:
    """Return ``total / divisor`` in ``dtype``, empty if it is not finite; dense in ``out``.

    All ranks find the same, because ``total`` is the same on all of them.
    """
    if total.values is out:  # who wrote it there has divided, and checked the result
        return total if total.finite else total.empty_like()
    if total.indices is None and out is not None:
        values = torch.div(total.values, divisor, out=out)
    elif divisor == 1:
        values = total.values.to(dtype)
    else:
        values = (total.values / divisor).to(dtype)
    finite = total.finite and all_finite(values)
    average = SparseStream.unchecked(total.indices, values, total.size, finite)
    return average if finite else average.empty_like()


def _write(average: SparseStream, update: Tensor, cleared: bool) -> None:
    """Write an average to ``update``, which a dense one shares already; NaN if not finite.

    ``cleared`` tells that ``update`` is zero already, except where a dense average is written.
    """
    if not average.finite:
        update.fill_(float("nan"))
    elif average.indices is not None:
        if cleared:
            kernels.scatter(update, average.indices, average.values)
        else:
            average.to_dense(out=update)


def update_like(gradient: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, checked, or a new tensor like ``gradient``."""
    if out is None:
        return torch.empty_like(gradient)
    check_type(out, Tensor, "out")
    check_like(out, gradient, tuple(gradient.shape))
    return out
