"""What becomes of the ranks' gradients: their sum, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from sparcel import api
from sparcel.comm import Communicator
from sparcel.stream import SparseStream

T = TypeVar("T")

Pending: TypeAlias = Callable[[], SparseStream]
"""Waits for a sum and returns it."""


class Timed:
    """Counts what exchanges between ranks took.

    Parameters
    ----------
    comm
        The ranks; None for one alone.

    Attributes
    ----------
    seconds
        How long this rank waited for the others so far.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm
        self.seconds = 0.0

    @property
    def volume(self) -> int:
        """The larger of the bytes sent and received so far."""
        return self._comm.traffic.volume if self._comm else 0

    def _timed(self, wait: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = wait()
        self.seconds += time.perf_counter() - start
        return result


class Exchange(Timed):
    """Sums gradients over ranks, and counts what that took.

    Parameters
    ----------
    comm
        The ranks; None for one alone, whose gradient is the sum.
    algorithm
        As for `sparcel.all_reduce`.
    max_nnz
        The most entries of any rank's gradient, alike on all ranks.
    """

    def __init__(self, comm: Communicator | None, algorithm: str, max_nnz: int) -> None:
        super().__init__(comm)
        self._algorithm, self._max_nnz = algorithm, max_nnz

    def start(self, gradient: SparseStream) -> Pending:
        """Begin to sum the ranks' gradients; all ranks call, in the same order."""
        if self._comm is None:
            return lambda: gradient
        job = api.all_reduce(
            gradient,
            algorithm=self._algorithm,
            group=self._comm,
            async_op=True,
            max_nnz=self._max_nnz,
        )
        return lambda: self._timed(job.wait)

    def sum(self, gradient: SparseStream) -> SparseStream:
        """Return the sum of the ranks' gradients; all ranks call."""
        if self._comm is None:
            return gradient
        return self._timed(
            lambda: api.all_reduce(
                gradient, algorithm=self._algorithm, group=self._comm, max_nnz=self._max_nnz
            )
        )
