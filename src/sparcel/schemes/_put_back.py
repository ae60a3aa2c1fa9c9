"""Whose memory keeps the sums that do not win, in `GTopK` and `OkTopK`."""

from __future__ import annotations

from sparcel.collectives.gtopk import GlobalTopk
from sparcel.schemes.exchange import Exchanged
from sparcel.stream import SparseStream, reduce
from sparcel.wire import Wire

PUT_BACK = ("dropped", "own")


def settled(outcome: GlobalTopk, sent: SparseStream, wire: Wire, put_back: str) -> Exchanged:
    """Return the exchange after which each rank keeps what it dropped, or what it sent in vain.

    Who takes back its own values takes them back unrounded.
    """
    total, kept = outcome.total, outcome.dropped
    if total.finite is False:
        return Exchanged(total, sent)
    if put_back == "own":
        lost = [stream.placed(start, sent.size) for start, stream in wire.take_lost()]
        kept = reduce([sent.without(total), *(stream.within(total) for stream in lost)])
    return Exchanged(total, sent, complete=False, kept=kept)
