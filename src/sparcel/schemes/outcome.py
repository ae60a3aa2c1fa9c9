"""What a step has done before it takes effect, and its average."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.device import Number, finite_flag
from sparcel.profiling import profiled
from sparcel.stream import SparseStream


class Outcome(NamedTuple):
    """A step that has not taken effect; `Scheme.commit` makes it.

    On a GPU, flags and counts may be tensors there until `Costs.settle` has read them.

    Attributes
    ----------
    average
        The average over the ranks, in the gradient's dtype, the same on all ranks. A dense one is
        in the ``out`` that `Scheme.reduce` got; `sparcel.stream.WRITTEN` once any is.
    finite
        Whether the vectors of all ranks, and their average, are finite. If not, the average is
        meaningless, and the step is void, on all ranks alike.
    sent, entries, magnitudes, coordinates, asked
        What the step adds to ``selected``, ``reduced``, ``magnitude``, ``coordinates`` and
        ``asked`` of `Costs`; the sum of the magnitudes.
    sent_whole
        Whether the gradient was sent as it is, with what `Request.apart` names.
    """

    average: SparseStream
    finite: bool | Tensor
    sent: Number
    entries: Number
    magnitudes: tuple[Number, ...]
    coordinates: int
    asked: int
    sent_whole: bool = False


def averaged(
    total: SparseStream, divisor: float, dtype: torch.dtype, out: Tensor | None = None
) -> SparseStream:
    """Return the average in ``dtype``; a dense one is in ``out``, if given.

    All ranks find the same, because the total is the same on all of them.
    """
    with profiled("update"):
        if total.indices is None and out is not None:
            values = kernels.average(total.values, divisor, out)
        elif divisor == 1:
            values = total.values.to(dtype)
        else:
            values = kernels.average(total.values, divisor).to(dtype)
        finite = total.finite & finite_flag(values)
        return SparseStream.unchecked(total.indices, values, total.size, finite)
