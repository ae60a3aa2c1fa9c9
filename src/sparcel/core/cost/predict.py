"""What an algorithm consists of, and the seconds, bytes and rounds that it takes.

A formula yields the terms of an algorithm: messages and work, without seconds, of rank 0, which has
as much to do as any other. `sparcel.core.cost.formulas` has one for each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from sparcel.core._checks import check_callable, check_type, checked_whole
from sparcel.core.cost.defaults import KINDS, default_rates
from sparcel.core.formats import RAW, Format, Lengths
from sparcel.core.rates import Curve, Rates
from sparcel.errors import InputError


def expected_union(size: int, k: int, streams: float) -> float:
    """Return n · (1 − (1 − k/n)^m): the nnz of the sum of m streams of k of n coordinates each.

    k lies in [0, n], n is at least 1. The relative error is that of a few roundings for any n, k
    and m.

    Source: SparCML, section 3.1 and appendix B.1.
    """
    return float(size) if k == size else -size * math.expm1(streams * log_absent(size, k))


def log_absent(size: int, k: int) -> float:
    """Return log(1 − k/n), for k < n, without losing digits at either end."""
    return math.log1p(-k / size) if 2 * k < size else math.log((size - k) / size)


@dataclass(frozen=True)
class Problem:
    """A sum over ranks, as far as its cost depends on it.

    Parameters
    ----------
    size, k
        Coordinates of the vector, and how many of them every rank sends.
    ranks, ranks_per_node
        How many ranks there are; consecutive ones share a node.
    itemsize
        Bytes of a coordinate's value, or row of values.
    spread
        Coordinates among which the ranks' indices lie, evenly and independently: the whole vector
        where it is None, ``k`` where all ranks have the same indices.
    format
        How streams travel.
    answer
        How what the owners of regions return travels; None for as what they are sent.
    """

    size: int
    k: int
    ranks: int
    ranks_per_node: int = 1
    itemsize: int = 4
    spread: int | None = None
    format: Format = RAW
    answer: Format | None = None

    def __post_init__(self) -> None:
        for name in ("size", "k", "ranks", "ranks_per_node", "itemsize"):
            checked_whole(getattr(self, name), name, at_least=1)
        if not self.k <= self.size:
            raise InputError(f"k must be at most the size, {self.size}, got {self.k}")
        if self.spread is not None:
            checked_whole(self.spread, "spread", at_least=self.k, at_most=self.size)

    def union(self, streams: float) -> float:
        """Return how many coordinates the sum of this many ranks' streams is expected to have."""
        return expected_union(self.spread or self.size, self.k, streams)

    @cached_property
    def lengths(self) -> Lengths:
        """How long messages of parts of the vector are."""
        return Lengths(self.format, self.size, self.itemsize)

    def message(self, streams: float) -> float:
        """Return the bytes of the sum of so many streams, sparse or dense."""
        return self.lengths.message(self.union(streams))

    def part(self, streams: float, parts: float) -> float:
        """Return the bytes of one of so many parts of the sum of so many streams."""
        return self.lengths.region_message(self.union(streams) / parts, round(self.size / parts))


@dataclass(frozen=True)
class Exchange:
    """Messages of one length, one after the other or at once.

    Attributes
    ----------
    pattern
        One of `sparcel.core.rates.TRANSFERS`.
    sent, received
        Bytes of each message that the rank sends, and receives; None for nothing.
    rounds
        How many there are.
    distance
        How many ranks apart the two ends of a message are.
    inside
        Whether all ends are in one node.
    """

    pattern: str
    sent: float | None
    received: float | None
    rounds: int = 1
    distance: int = 1
    inside: bool = False

    @property
    def nbytes(self) -> float:
        """Bytes of a message in the direction that has more."""
        return max(self.sent or 0, self.received or 0)


@dataclass(frozen=True)
class EngineSum:
    """The engine's dense all-reduce of ``size`` values, counted as the ring that it stands for."""

    size: int
    itemsize: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        return self.size * self.itemsize

    @property
    def rounds(self) -> int:
        """Messages on the critical path."""
        return 2 * (self.ranks - 1)

    @property
    def sent(self) -> float:
        """Bytes of each message."""
        return self.nbytes / self.ranks

    received = sent


@dataclass(frozen=True)
class Work:
    """What ranks compute, each on its own.

    Attributes
    ----------
    kind
        One of `sparcel.core.rates.WORK`.
    amount
        Of the rank that has most to do, in the unit that `KINDS` gives.
    busy
        The share of the ranks that do this at the same time.
    times
        How often this is done, to such an amount.
    """

    kind: str
    amount: float
    busy: float = 1.0
    times: float = 1


@dataclass(frozen=True)
class Fastest:
    """The formula that is the fastest for independent indices, as far as the ranks know."""

    candidates: Mapping[str, Formula]


Term: TypeAlias = Exchange | EngineSum | Work | Fastest
Formula: TypeAlias = Callable[[Problem], Iterable[Term]]


@dataclass(frozen=True)
class Prediction:
    """The expected cost of an all-reduce or a training step.

    Attributes
    ----------
    seconds
        Total time: the sum of the next four.
    select, encode, exchange, reduce
        Seconds in each phase.
    bytes
        The larger of the bytes sent and the bytes received by the rank that has most to do.
    rounds
        Messages on the critical path.
    """

    seconds: float
    select: float
    encode: float
    exchange: float
    reduce: float
    bytes: int
    rounds: int


class Counts(NamedTuple):
    """Messages and bytes of the rank that has most to do, and rounds."""

    messages_sent: int
    bytes_sent: float
    messages_received: int
    bytes_received: float
    rounds: int


def count(formula: Formula, problem: Problem, rates: Rates | None = None) -> Counts:
    """Return the expected messages, bytes and rounds; ``rates`` decide what is the fastest."""
    terms = _resolved(formula, problem, default_rates() if rates is None else rates)
    return _counted([term for term in terms if not isinstance(term, Work)])


def predict(formula: Formula, problem: Problem, rates: Rates | None = None) -> Prediction:
    """Return the predicted cost of an algorithm.

    Parameters
    ----------
    formula
        Of the algorithm: an entry of `SUMS` or `STEPS`.
    rates
        None for `default_rates`.
    """
    check_callable(formula, "formula")
    check_type(problem, Problem, "problem")
    rates = default_rates() if rates is None else rates
    check_type(rates, Rates, "rates")
    phases = dict.fromkeys(("select", "encode", "exchange", "reduce"), 0.0)
    traffic = []
    for term in _resolved(formula, problem, rates):
        if isinstance(term, Work):
            phases[KINDS[term.kind].phase] += work_seconds(term, rates)
            continue
        traffic.append(term)
        if isinstance(term, Exchange):
            phases["exchange"] += term.rounds * _message_seconds(term, problem, rates)
        else:
            phases["exchange"] += _engine_seconds(term, problem, rates)
    counts = _counted(traffic)
    volume = round(max(counts.bytes_sent, counts.bytes_received))
    return Prediction(sum(phases.values()), **phases, bytes=volume, rounds=counts.rounds)


def choose(candidates: Mapping[str, Formula], problem: Problem, rates: Rates | None = None) -> str:
    """Return the candidate that is predicted to be the fastest; of equal ones, the first.

    Only the arguments decide, so ranks with equal arguments make the same choice.
    """
    if not candidates:
        raise InputError("choose needs at least one candidate, got none")
    return min(candidates, key=lambda name: predict(candidates[name], problem, rates).seconds)


def work_seconds(term: Work, rates: Rates) -> float:
    """Return the seconds of work; ranks slow each other less if fewer of them work at once."""
    shared = max(1.0, rates.crowding * term.busy) / rates.crowding
    return term.times * rates[term.kind](term.amount) * shared


def _resolved(
    formula: Formula, problem: Problem, rates: Rates
) -> Iterator[Exchange | EngineSum | Work]:
    """Yield the terms of a formula, and in place of choices those of what is chosen."""
    for term in formula(problem):
        if isinstance(term, Fastest):
            chosen = choose(term.candidates, replace(problem, spread=None), rates)
            yield from _resolved(term.candidates[chosen], problem, rates)
        else:
            yield term


def _counted(traffic: Sequence[Exchange | EngineSum]) -> Counts:
    return Counts(
        sum(term.rounds for term in traffic if term.sent is not None),
        sum(term.rounds * (term.sent or 0) for term in traffic),
        sum(term.rounds for term in traffic if term.received is not None),
        sum(term.rounds * (term.received or 0) for term in traffic),
        sum(term.rounds for term in traffic),
    )


def _message_seconds(term: Exchange, problem: Problem, rates: Rates) -> float:
    """Return the seconds of one message of an exchange."""
    between = rates[term.pattern]
    # A gather inside a node is not measured; a rotation sends as many messages.
    inner_pattern = "rotate" if term.pattern == "gather" else term.pattern
    within: Curve = rates.curves.get(f"node.{inner_pattern}", between)
    if term.inside:
        return within(term.nbytes)
    here = problem.ranks_per_node
    if term.pattern in ("rotate", "gather") or here == 1 or term.distance >= here:
        return between(term.nbytes)
    # This many of a node's ranks have a peer on another node, and share the node's link.
    crossing = term.distance / here if term.pattern == "shift" else 0.0
    inner = within(term.nbytes)
    return max(inner, between(term.nbytes * crossing)) if crossing else inner


def _engine_seconds(term: EngineSum, problem: Problem, rates: Rates) -> float:
    """Return the seconds of the engine's sum, scaled from the measured to this number of ranks.

    Where it is a sum of one rank of each node, the nodes' other ranks sum at the same time. The
    links then carry as much as one sum of all their bytes.
    """
    curve = rates["dense.bfloat16" if term.itemsize == 2 else "dense.float32"]
    sums = min(problem.ranks_per_node, problem.ranks // term.ranks)
    measured, asked, had = curve(sums * term.nbytes), term.ranks, rates.ranks
    if asked == had or had == 1:
        return measured
    return measured * (asked - 1) / asked * had / (had - 1)
