"""Whose memory keeps the sums that do not win, in `GTopK` and `OkTopK`."""

from __future__ import annotations

from sparcel.collectives.gtopk import GlobalTopk
from sparcel.schemes.ledger import Ledger
from sparcel.stream import SparseStream
from sparcel.wire import Wire

PUT_BACK = ("dropped", "own")


def put_back(outcome: GlobalTopk, ledger: Ledger, wire: Wire, rule: str) -> SparseStream:
    """Keep what this rank dropped, or what it sent in vain; return what won.

    A rank that takes back its own values takes them back unrounded.
    """
    total = outcome.total
    if rule == "dropped":
        ledger.keep(outcome.dropped)
    else:
        ledger.keep(ledger.sent.without(total))
        for start, lost in wire.take_lost():
            ledger.keep(lost.placed(start, total.size).within(total))
    return total
