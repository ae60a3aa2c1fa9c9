"""What a step tells before it takes effect: the sum, and its average."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparcel import device, kernels
from sparcel._checks import finite_flag
from sparcel.stream import SparseStream


class Reduced(NamedTuple):
    """The sum of a step, the same on all ranks.

    Attributes
    ----------
    total
        The sum.
    divisor
        What ``total`` is divided by for the update: the number of ranks over the gradient's scale.
        None: ``total`` is the average already, in the gradient's dtype, not ``finite`` if it has
        NaN or Inf; a dense one is in the ``out`` that `Scheme.reduce` got.
    sent_whole
        Whether the gradient was sent as it is, with what `Request.apart` names.
    entries
        How many coordinates came back, where ``total`` was made dense of fewer.
    """

    total: SparseStream
    divisor: float | None
    sent_whole: bool = False
    entries: int | None = None

    @property
    def nnz(self) -> int:
        """How many coordinates came back."""
        return self.total.nnz if self.entries is None else self.entries


class Begun(NamedTuple):
    """A step that has not taken effect; `Scheme.commit` makes it.

    ``average`` is in the gradient's dtype. It is empty and not ``finite`` if the step is void, on
    all ranks alike. ``sent_whole`` is that of `Reduced`.
    """

    average: SparseStream
    sent_whole: bool

    @property
    def finite(self) -> bool:
        """Whether the vectors of all ranks, and their average, are finite."""
        return device.truth(self.average.finite)

    def without_average(self) -> Begun:
        """Return what `Scheme.commit` needs, for steps of several vectors that commit together."""
        return Begun(self.average.empty_like(), self.sent_whole)


def averaged(reduced: Reduced, dtype: torch.dtype, out: Tensor | None = None) -> SparseStream:
    """Return the average in ``dtype``, empty if it is not finite; a dense one is in ``out``.

    All ranks find the same, because the total is the same on all of them.
    """
    total, divisor = reduced.total, reduced.divisor
    if divisor is None and total.dtype == dtype:
        finite = device.truth(total.finite)
        average = SparseStream.unchecked(total.indices, total.values, total.size, finite)
        return average if finite else average.empty_like()
    if total.indices is None and out is not None:
        values = kernels.average(total.values, divisor or 1, out)
    elif divisor is None or divisor == 1:
        values = total.values.to(dtype)
    else:
        values = kernels.average(total.values, divisor).to(dtype)
    finite = device.truth(total.finite & finite_flag(values))
    average = SparseStream.unchecked(total.indices, values, total.size, finite)
    return average if finite else average.empty_like()


def write_update(average: SparseStream, update: Tensor, cleared: bool) -> None:
    """Write an average to ``update``, where a dense one is already; NaN if it is not finite.

    ``cleared`` tells that ``update`` is zero, unless the average is dense.
    """
    if not average.finite:
        update.fill_(float("nan"))
    elif average.indices is not None:
        if cleared:
            kernels.scatter(update, average.indices, average.values)
        else:
            average.to_dense(out=update)
