"""What an algorithm consists of: exchanges and work, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from sparcel.cost.problem import Problem
from sparcel.cost.rates import Rates


@dataclass(frozen=True)
class Exchange:
    """Messages that ranks exchange at once.

    Attributes
    ----------
    pattern
        One of `sparcel.cost.rates.TRANSFERS`.
    nbytes
        Of a message of the rank that has most.
    messages
        How many a rank sends: P−1 for ``rotate`` and ``gather``, else 1.
    distance
        How many ranks apart the two ends of a message are.
    sends, receives
        Whether the rank with the largest volume sends, and receives, these messages.
    inside
        Whether all ends are in one node.
    times
        How often this is done, with equally many bytes.
    """

    pattern: str
    nbytes: float
    messages: int = 1
    distance: int = 1
    sends: bool = True
    receives: bool = True
    inside: bool = False
    times: int = 1

    @property
    def rounds(self) -> int:
        """Messages on the critical path."""
        return self.messages * self.times

    def seconds(self, problem: Problem, rates: Rates) -> float:
        """Return how long this takes."""
        return self.times * self.messages * self._one(problem, rates)

    def _one(self, problem: Problem, rates: Rates) -> float:
        between = rates[self.pattern]
        within = rates.curves.get(f"node.{self.pattern}", between)
        if self.inside:
            return within(self.nbytes)
        here = problem.ranks_per_node
        if self.pattern in ("rotate", "gather") or here == 1 or self.distance >= here:
            return between(self.nbytes)
        # Of a node's ranks so many have a peer elsewhere, and share the node's link.
        crossing = self.distance / here if self.pattern == "shift" else 0.0
        inner = within(self.nbytes)
        return max(inner, between(self.nbytes * crossing)) if crossing else inner


@dataclass(frozen=True)
class EngineSum:
    """The engine's dense all-reduce of ``nbytes``, counted as a ring."""

    nbytes: float
    half: bool = False

    def rounds_of(self, problem: Problem) -> int:
        """Messages on the critical path."""
        return 2 * (problem.ranks - 1)

    def volume(self, problem: Problem) -> float:
        """Bytes that a rank sends, and receives."""
        return 2 * self.nbytes * (problem.ranks - 1) / problem.ranks

    def seconds(self, problem: Problem, rates: Rates) -> float:
        """Return how long this takes, on other ranks than were measured in proportion."""
        measured = rates["dense.bfloat16" if self.half else "dense.float32"](self.nbytes)
        asked, had = problem.ranks, rates.ranks
        if asked == had or had == 1:
            return measured
        return measured * (asked - 1) / asked * had / (had - 1)


@dataclass(frozen=True)
class Work:
    """What ranks compute, each on its own.

    Attributes
    ----------
    kind
        One of `sparcel.cost.rates.WORK`.
    amount
        Of the rank that has most to do, in the unit given there.
    busy
        The share of the ranks that do this at the same time.
    times
        How often this is done, to such an amount.
    """

    kind: str
    amount: float
    busy: float = 1.0
    times: int = 1

    def seconds(self, problem: Problem, rates: Rates) -> float:
        """Return how long this takes, on fewer ranks the less they are in each other's way."""
        shared = max(1.0, rates.crowding * self.busy) / rates.crowding
        return self.times * rates[self.kind](self.amount) * shared


Step: TypeAlias = Exchange | EngineSum | Work

PHASES = {
    "select": "select",
    "topk": "select",
    "largest": "select",
    "histogram": "select",
    "without": "select",
    "encode": "encode",
    "decode": "encode",
    "merge": "reduce",
    "merge.many": "reduce",
    "split": "reduce",
    "join": "reduce",
    "small": "reduce",
    "scatter": "reduce",
    "fill": "reduce",
    "add": "reduce",
}
"""The phase that each kind of work counts to."""
