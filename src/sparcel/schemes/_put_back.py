"""Whose memory keeps the sums that do not win, in `GTopK` and `OkTopK`."""

from __future__ import annotations

from sparcel.collectives.gtopk import GlobalTopk
from sparcel.schemes.sparsifier import Exchanged
from sparcel.stream import SparseStream

PUT_BACK = ("dropped", "own")


def settled(outcome: GlobalTopk, sent: SparseStream, put_back: str) -> Exchanged:
    """Return the exchange after which each rank keeps what it dropped, or what it sent in vain."""
    if not outcome.total.finite:
        return Exchanged(outcome.total, sent)
    kept = sent.without(outcome.total) if put_back == "own" else outcome.dropped
    return Exchanged(outcome.total, sent, kept, complete=False)
