"""What an exchange of the ranks' selections gets, and what it returns: no memory is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparcel.collectives.oktopk_reuse import Estimates
from sparcel.memory import Placed, Share
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Selection:
    """A rank's selection from memory + gradient.

    ``k`` is the number of coordinates that the density asks for. ``most`` is an upper bound on the
    entries that any rank selected. Both are the same on all ranks. ``shares`` tell how many
    coordinates were to be taken of which range. ``rest`` (``[size]``) is what the selection leaves
    in memory; an exchange reads it, and says in `Exchanged` how it changes.
    """

    stream: SparseStream
    k: int
    most: int
    shares: Sequence[Share]
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
        What of ``sent`` returns to this rank's memory.
    unsent, instead
        What of the selection was not sent, and what was sent without being selected.
    arrived, released
        What of the sums went into this rank's memory, and what left it for ``total``.
    estimates
        What a later step may reuse.
    """

    total: SparseStream
    sent: SparseStream
    complete: bool = True
    kept: SparseStream | None = None
    unsent: Placed | None = None
    instead: SparseStream | None = None
    arrived: Placed | None = None
    released: SparseStream | None = None
    estimates: Estimates | None = None

    @property
    def enters(self) -> list[Placed]:
        """What is added to this rank's memory; see `Memory.settle`."""
        return [placed for placed in (self.unsent, self.arrived) if placed is not None]

    @property
    def leaves(self) -> list[SparseStream]:
        """What is then taken out of it, besides the selection."""
        return [stream for stream in (self.instead, self.released) if stream is not None]

    @property
    def returns(self) -> list[Placed]:
        """What is added in the end."""
        return [] if self.kept is None else [(0, self.kept)]

    @property
    def applied(self) -> list[SparseStream]:
        """What ``total`` has of this rank's memory: of what it sent, and of what was released."""
        sent = self.sent if self.complete else self.sent.within(self.total)
        return [sent] if self.released is None else [sent, self.released]

    @property
    def magnitude(self) -> float | Tensor:
        """The magnitude that leaves this rank's memory, less what comes back or arrives."""
        arrived = None if self.arrived is None else self.arrived[1]
        out, back = (self.sent, self.released), (self.kept, arrived)
        return sum(map(magnitude_of, out)) - sum(map(magnitude_of, back))


def magnitude_of(stream: SparseStream | None) -> float | Tensor:
    """Return the sum of the magnitudes of a stream's values, on its device; 0 for none."""
    if stream is None:
        return 0.0
    magnitude = stream.values.abs().sum()  # four times as fast as torch's 1-norm
    return float(magnitude) if magnitude.is_cpu else magnitude
