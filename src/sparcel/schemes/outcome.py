"""What a step has done before it takes effect, and its average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel import device, kernels
from sparcel._checks import finite_flag
from sparcel.device import Number
from sparcel.profiling import profiled
from sparcel.stream import SparseStream


class Outcome(NamedTuple):
    """A step that has not taken effect; `Scheme.commit` makes it.

    On a GPU, flags and counts may be tensors there until `settled` has read them.

    Attributes
    ----------
    average
        The average over the ranks, in the gradient's dtype, the same on all ranks; a dense one is
        in the ``out`` that `Scheme.reduce` got. `WRITTEN` once it is there in any case.
    finite
        Whether the vectors of all ranks, and their average, are finite. If not, the average is
        meaningless, and the step is void, on all ranks alike.
    coordinates, asked, sent, entries, magnitude
        What the step adds to ``coordinates``, ``asked``, ``selected``, ``reduced`` and
        ``magnitude`` of `Costs`.
    sent_whole
        Whether the gradient was sent as it is, with what `Request.apart` names.
    """

    average: SparseStream
    finite: bool | Tensor
    coordinates: int
    asked: int
    sent: Number
    entries: Number
    magnitude: Number = 0.0
    sent_whole: bool = False


WRITTEN = SparseStream.unchecked(torch.empty(0, dtype=torch.int32), torch.empty(0), 0)
"""Stands for an average that is in its place already."""


def settled(
    outcomes: Sequence[Outcome], flags: Sequence[bool | Tensor] = ()
) -> tuple[list[Outcome], bool]:
    """Return outcomes in numbers of the host, and whether all of them and all flags are true.

    This is where the host looks at a GPU, once.
    """
    values = [value for one in outcomes for value in (one.finite, *one[4:7])]
    found = device.numbers([*flags, *values])
    on_host, finite = [], all(found[: len(flags)])
    for place, one in enumerate(outcomes):
        held, sent, entries, magnitude = found[len(flags) + 4 * place :][:4]
        counts = {"sent": sent, "entries": entries, "magnitude": magnitude}
        on_host.append(one._replace(finite=held, **counts))
        finite = finite and held
    return on_host, finite


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
