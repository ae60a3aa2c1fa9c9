"""Memory: the residual that a rank keeps back, so that nothing unsent is lost (error feedback)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import all_finite
from sparcel.errors import InputError
from sparcel.ops import SUM
from sparcel.stream import SparseStream


class Memory:
    """A residual and one scratch vector, which change places when a step commits.

    A step computes ``scratch = residual + gradient − sent``; until `commit` the residual is as it
    was. float32, or float64 for float64 gradients.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.withheld: Sequence[tuple[int, int]] = ()
        """Ranges ``[start, stop)`` of which the next selection takes nothing."""
        self._scratch: Tensor | None = None

    def select(self, gradient: Tensor, k: int, chunk: int | None = None) -> SparseStream:
        """Take the k largest of residual + gradient out, and leave the rest in scratch.

        Parameters
        ----------
        gradient
            ``[size]``, any float dtype; the same size at every step.
        k, chunk
            ``min(k, nnz)`` entries are taken of the whole vector, or of every ``chunk``
            consecutive coordinates.

        Returns
        -------
        SparseStream
            What to send. Not finite, and empty, where residual + gradient is not finite.

        Raises
        ------
        InputError
            When the gradient's size or device is not that of the step before.
        """
        residual, scratch = self._buffers(gradient)
        ranges, self.withheld = self.withheld, ()
        with _emptied(residual, ranges):
            indices, values, finite = kernels.accumulate_topk(residual, gradient, scratch, k, chunk)
        for start, stop in ranges:
            scratch[start:stop] = residual[start:stop]
        if not finite:
            indices, values = indices[:0], values[:0]
        return SparseStream.unchecked(indices, values, gradient.numel(), finite)

    def give_back(self, stream: SparseStream, start: int = 0) -> None:
        """Add a stream, whose first coordinate is ``start``, to what the step keeps back.

        A sum beyond the largest finite number stays at that: the other ranks have finished the
        step, and Inf may not enter memory.
        """
        assert self._scratch is not None, "give_back follows select"
        region = self._scratch[start : start + stream.size]
        if stream.indices is None:
            _saturate(region.add_(stream.values))
        else:
            kernels.scatter_reduce(region, stream.indices, stream.values, SUM)
            sums = region[stream.indices]
            if _saturate(sums):
                region[stream.indices] = sums

    def commit(self) -> None:
        """Make what the step keeps back the residual."""
        self.residual, self._scratch = self._scratch, self.residual

    def load(self, residual: Tensor | None) -> None:
        """Take over a copy of ``residual``, or forget everything when it is None."""
        self.residual = None if residual is None else residual.clone()
        self._scratch = None

    def check(self, gradient: Tensor) -> None:
        """Raise `InputError` when the gradient's size or device is not that of the residual."""
        residual = self.residual
        if residual is None:
            return
        if (residual.numel(), residual.device) != (gradient.numel(), gradient.device):
            raise InputError(
                f"this scheme remembers a vector of {residual.numel()} coordinates on"
                f" {residual.device}, got a gradient of {gradient.numel()} on {gradient.device};"
                " make one scheme for each vector"
            )

    def _buffers(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual, zeros before the first commit, and the scratch for a step."""
        self.check(gradient)
        residual = self.residual
        if residual is None:
            wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            residual = torch.zeros(gradient.numel(), dtype=wide, device=gradient.device)
        if self._scratch is None or not _alike(self._scratch, residual):
            self._scratch = torch.empty_like(residual)
        return residual, self._scratch


@contextmanager
def _emptied(residual: Tensor, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Let ``residual`` be zero in ``ranges`` for the time of the block."""
    parts = [residual[start:stop] for start, stop in ranges]
    saved = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:
        for part, values in zip(parts, saved, strict=True):
            part.copy_(values)


def _saturate(sums: Tensor) -> bool:
    """Replace infinite numbers by the largest finite ones, in place; tell whether there were."""
    if all_finite(sums):
        return False
    largest = torch.finfo(sums.dtype).max
    sums.clamp_(-largest, largest)
    return True


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
