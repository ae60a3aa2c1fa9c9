"""What an epoch was like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """What one pass over the rows, or over the coordinates, was like.

    Attributes
    ----------
    number
        Epochs so far, this one included.
    loss
        Mean loss of the rows: with SGD, each before the step that used it (progressive
        validation), and with several classes the sum over these; with SCD, at the epoch's end.
    seconds, communication_seconds
        Wall clock on this rank; the time it waited for the other ranks.
    volume
        The larger of the bytes that this rank sent and received.
    """

    number: int
    loss: float
    seconds: float
    communication_seconds: float
    volume: int
