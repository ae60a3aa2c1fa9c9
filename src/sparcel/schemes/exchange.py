"""What an exchange of the ranks' selections gets, and what it returns: no memory is changed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.oktopk_reuse import Estimates
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Selection:
    """A rank's selection from memory + gradient.

    ``k`` is the number of coordinates that the density asks for. ``most`` is an upper bound on the
    entries that any rank selected. Both are the same on all ranks. ``rest`` (``[size]``) is what
    the selection leaves in memory; an exchange may take more out of it.
    """

    stream: SparseStream
    k: int
    most: int
    rest: Tensor


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange of the ranks' selections.

    Attributes
    ----------
    total, sent
        The sum that all ranks apply, and what this rank contributed.
    complete
        Whether ``total`` has all coordinates of ``sent``.
    kept
        What returns to this rank's memory.
    estimates
        What a later step may reuse.
    """

    total: SparseStream
    sent: SparseStream
    complete: bool = True
    kept: SparseStream | None = None
    estimates: Estimates | None = None

    @property
    def applied(self) -> SparseStream:
        """What ``total`` has of what this rank sent."""
        return self.sent if self.complete else self.sent.within(self.total)

    @property
    def magnitude(self) -> float | Tensor:
        """The magnitude that leaves this rank's memory, less what comes back."""
        return magnitude_of(self.sent) - magnitude_of(self.kept)


def magnitude_of(stream: SparseStream | None) -> float | Tensor:
    """Return the sum of the magnitudes of a stream's values, on its device; 0 for none."""
    if stream is None:
        return 0.0
    magnitude = stream.values.abs().sum()  # four times as fast as torch's 1-norm
    return float(magnitude) if magnitude.is_cpu else magnitude
