"""The results of the demo: combines the ranks' measurements to one row a method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparcel.errors import SparcelError


class DivergedError(SparcelError):
    """The ranks ended with different models; no method may do that."""


@dataclass(frozen=True)
class MethodResult:
    """A method's results. Times are those of a step: median over steps, then mean over ranks.

    Attributes
    ----------
    method
        Name of the method.
    step_s
        A whole step: forward, backward, exchange, optimiser.
    compute_s
        The same step without the exchange (DDP's ``no_sync``), on all ranks at once.
    exposed_s
        Time that the exchange adds to the step: ``step_s - compute_s``.
    select_s, communicate_s
        Time in which sparcel selects and exchanges, which may overlap with the backward pass; None
        for plain DDP, which does not report it.
    payload_bytes
        Bytes that the busiest rank hands to the network; for DDP's own all-reduce, the least
        possible.
    wire_bytes
        Bytes that the busiest rank's interface sent, headers included; None on loopback.
    accuracy
        Share of the held-out samples classified correctly after the last step, between 0 and 1.
    """

    method: str
    step_s: float
    compute_s: float
    exposed_s: float
    select_s: float | None
    communicate_s: float | None
    payload_bytes: float
    wire_bytes: float | None
    accuracy: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that the busiest rank sent: those on the wire if counted, else the payload."""
        return self.payload_bytes if self.wire_bytes is None else self.wire_bytes


def combine(method: str, ranks: Sequence[Mapping[str, Any]]) -> MethodResult:
    """Combine the reports of a method's ranks to its row.

    Raises
    ------
    DivergedError
        When the ranks' models differ.
    """
    if len({rank["fingerprint"] for rank in ranks}) != 1:
        raise DivergedError(f"with {method}, the ranks ended with different models; please report")

    def mean(key: str) -> float | None:
        return statistics.mean(rank[key] for rank in ranks) if key in ranks[0] else None

    step_s, compute_s = mean("step_s"), mean("compute_s")
    assert step_s is not None and compute_s is not None
    return MethodResult(
        method,
        step_s,
        compute_s,
        step_s - compute_s,
        mean("select_s"),
        mean("communicate_s"),
        max(rank["payload_bytes"] for rank in ranks),
        max(rank["wire_bytes"] for rank in ranks) if "wire_bytes" in ranks[0] else None,
        ranks[0]["accuracy"],
    )
