"""What work and messages take where nothing is measured: kinds of work, and stated rates.

Five kinds of work predict as well as the fifteen that there were: whatever else ranks do takes
about a whole number of times as long as one of these (`sparcel.core.cost.formulas`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from sparcel.core import kernels
from sparcel.core._checks import checked_number, checked_whole
from sparcel.core.formats import RAW, merge_messages
from sparcel.core.ops import SUM
from sparcel.core.rates import DENSE, TRANSFERS, Curve, Rates
from sparcel.core.stream import SparseStream

Run = Callable[[], object]

_COORDINATES = (256, 16 << 10, 256 << 10, 2 << 20, 16 << 20)


@dataclass(frozen=True)
class Kind:
    """A kind of work, which all ranks do at the same time.

    Attributes
    ----------
    phase
        The phase of a prediction that it belongs to.
    call_s, unit_s
        Default seconds of a call, and of a unit, on one core of a server of about 2022. They are
        conservative, like all defaults.
    amounts
        The amounts that are timed.
    trial
        Makes the call to time, of an amount and a seed.
    """

    phase: str
    call_s: float
    unit_s: float
    amounts: tuple[int, ...]
    trial: Callable[[int, int], Run]


def _select(size: int, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    memory, scratch = torch.zeros(size), torch.empty(size)
    gradient = torch.randn(size, generator=generator)
    addition = kernels.Addition(memory, gradient, scratch)
    return lambda: kernels.accumulate_topk(addition, -(-size // 1000))


def _merge(entries: int, seed: int) -> Run:
    """Reduce the messages of two streams that have ``entries`` entries in total."""
    parts = [_stream(-(-entries // 2), seed + part) for part in range(2)]
    for part in parts:
        part.size = max(one.size for one in parts)
    messages = [RAW.encode(part).message for part in parts]
    return lambda: merge_messages(messages, parts[0], SUM)


def _add(size: int, seed: int) -> Run:
    vector = torch.zeros(size)
    return lambda: vector.sub_(1.0)


def _encode(nbytes: int, seed: int) -> Run:
    stream = _stream(nbytes // 8, seed)
    return lambda: RAW.encode(stream)


def _small(operations: int, seed: int) -> Run:
    counts = torch.arange(1024)

    def run() -> None:
        for _ in range(operations):
            counts.cumsum(0)

    return run


def _stream(entries: int, seed: int, gap: int = 100) -> SparseStream:
    """Return a stream that stores about one coordinate in ``gap``."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(1, 2 * gap, (entries,), dtype=torch.int32, generator=generator)
    indices = gaps.cumsum(0, dtype=torch.int32)
    values = torch.randn(entries, generator=generator)
    return SparseStream.unchecked(indices, values, 2 * gap * entries)


KINDS = {
    # Adding a gradient to the memory, and taking the largest out; coordinates.
    "select": Kind("select", 30e-6, 0.35e-9, _COORDINATES, _select),
    # Adding the sparse messages of two ranks; entries of both together.
    "merge": Kind("reduce", 15e-6, 2e-9, (16, 1 << 10, 16 << 10, 128 << 10, 1 << 20), _merge),
    # A pass over a dense vector, which adds to it, clears it or copies it; coordinates.
    "add": Kind("reduce", 5e-6, 0.3e-9, _COORDINATES, _add),
    # Writing a message of float32 entries; bytes.
    "encode": Kind("encode", 15e-6, 0.15e-9, (128, 8 << 10, 128 << 10, 1 << 20, 8 << 20), _encode),
    # A series of operations on tensors of about a thousand numbers; operations.
    "small": Kind("reduce", 0.0, 4e-6, (1, 100), _small),
}
"""Kinds of work by name, as `rates.WORK` lists them; each comment ends with the unit."""

_POSTING_SECONDS = 20e-6
"""Time that a rank spends on sending and receiving one of many simultaneous messages."""

_CORE_BYTES_PER_S = 10e9
"""The memory bandwidth of such a core."""


def stated_rates(
    *,
    bandwidth: float,
    latency_s: float,
    ranks: int,
    ranks_per_node: int = 1,
    node_bandwidth: float = 10e9,
    node_latency_s: float = 10e-6,
    memory_bandwidth: float = _CORE_BYTES_PER_S,
    description: str = "",
) -> Rates:
    """Return the rates of a cluster from a few stated figures.

    Parameters
    ----------
    bandwidth, latency_s
        A node's link to the other nodes: bytes a second in each direction, seconds a message.
    ranks, ranks_per_node
        Number of ranks. Consecutive ranks share a node and its link.
    node_bandwidth, node_latency_s
        Each rank's link to other ranks of its node, in the same units.
    memory_bandwidth
        Bytes a second of each rank's device. The times of work are scaled by it; the table holds
        those of one core with 10 GB/s.
    description
        What to call the rates; by default the bandwidth and latency of the slowest link that there
        is, "stated".
    """
    bandwidth = checked_number(bandwidth, "bandwidth", above=0)
    latency_s = checked_number(latency_s, "latency_s", at_least=0)
    ranks = checked_whole(ranks, "ranks", at_least=1)
    ranks_per_node = checked_whole(ranks_per_node, "ranks_per_node", at_least=1)
    node_bandwidth = checked_number(node_bandwidth, "node_bandwidth", above=0)
    node_latency_s = checked_number(node_latency_s, "node_latency_s", at_least=0)
    memory_bandwidth = checked_number(memory_bandwidth, "memory_bandwidth", above=0)
    here = min(ranks_per_node, ranks)
    slowest = (bandwidth, latency_s) if here < ranks else (node_bandwidth, node_latency_s)
    within = Curve.line(node_latency_s, 1 / node_bandwidth)
    between = within if here == ranks else Curve.line(latency_s, here / bandwidth)
    curves = {
        "shift": between,
        # In a tree, one rank of each node has a peer on another node.
        "tree": within if here == ranks else Curve.line(latency_s, 1 / bandwidth),
        **dict.fromkeys(("rotate", "gather"), _to_all(within, between, ranks, here)),
        **{f"node.{name}": within for name in TRANSFERS},
        **dict.fromkeys(DENSE, _engine(*slowest, ranks)),
    }
    for name, kind in KINDS.items():
        slower = 1.0 if name == "small" else _CORE_BYTES_PER_S / memory_bandwidth
        curves[name] = Curve.line(kind.call_s, kind.unit_s * slower)
    if not description:
        description = f"{8e-9 * slowest[0]:g} Gbit/s and {1e6 * slowest[1]:g} µs, stated"
    return Rates(curves, ranks, here, measured=False, description=description)


@lru_cache(maxsize=1)
def default_rates() -> Rates:
    """Return rates for an unknown cluster: Gloo on Ethernet of 1 Gbit/s and 100 µs."""
    return stated_rates(
        bandwidth=1e9 / 8, latency_s=100e-6, ranks=8, description="1 Gbit/s and 100 µs, assumed"
    )


def _to_all(within: Curve, between: Curve, ranks: int, here: int) -> Curve:
    """Return the time of one message when a rank sends one to every other rank at once.

    Most of the other ranks are on other nodes. All messages share one latency; each also costs
    `_POSTING_SECONDS`.
    """
    others = max(1, ranks - 1)
    inner = (here - 1) / others

    def at(nbytes: float) -> float:
        body = inner * (within(nbytes) - within(0)) + (1 - inner) * (between(nbytes) - between(0))
        latency = between(0) if here < ranks else within(0)
        return body + max(min(latency, _POSTING_SECONDS), latency / others)

    return Curve(((0.0, at(0)), (1e9, at(1e9))))


def _engine(bandwidth: float, latency_s: float, ranks: int) -> Curve:
    """Return a ring's time as a function of the vector's bytes; it uses each node's link once."""
    rounds, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    return Curve.line(rounds * latency_s, share / bandwidth)
