"""Collectives: algorithms over streams, each a plain function to be read beside its paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sparcel import cost
from sparcel.collectives.allgather import allgather
from sparcel.collectives.dense import dense
from sparcel.collectives.gtopk import GlobalTopk, gathered_topk, gtopk
from sparcel.collectives.halving_doubling import halving_doubling
from sparcel.collectives.oktopk import Estimates, oktopk, oktopk_reuse
from sparcel.collectives.recursive_doubling import recursive_doubling
from sparcel.collectives.ring import ring
from sparcel.collectives.split_allgather import (
    Quantized,
    quantized_split_allgather,
    split_allgather,
)
from sparcel.comm import Communicator
from sparcel.cost import Rates
from sparcel.errors import InputError, known
from sparcel.ops import SUM, Op
from sparcel.stream import SparseStream

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Estimates",
    "GlobalTopk",
    "Quantized",
    "all_reduce",
    "check_algorithm",
    "gathered_topk",
    "gtopk",
    "oktopk",
    "oktopk_reuse",
    "quantized_split_allgather",
]

Algorithm = Callable[[SparseStream, Communicator, Op, int | None], SparseStream]
"""``(stream, comm, op, max_nnz) -> reduced stream``; every rank calls, every rank gets the same.

``max_nnz`` bounds the entries of every rank's stream, or is None; all ranks give the same.
"""

ALGORITHMS: dict[str, Algorithm] = {
    "dense": dense,
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "split_allgather": split_allgather,
    "ring": ring,
}


def all_reduce(
    stream: SparseStream,
    comm: Communicator,
    op: Op = SUM,
    algorithm: str = "auto",
    max_nnz: int | None = None,
) -> SparseStream:
    """Run the all-reduce of that name, inside a job of ``comm``."""
    if algorithm == "auto" and (comm.size <= 2 or stream.size == 0):
        algorithm = "recursive_doubling"  # two ranks can but exchange what they have
    if algorithm == "auto":
        if max_nnz is None:
            # ⌈log₂P⌉ rounds of 8 bytes; what is sent in vain without knowing costs more.
            max_nnz = max(comm.gather_numbers(stream.nnz))
        algorithm = _choose(stream, comm, op, max_nnz)
    return ALGORITHMS[algorithm](stream, comm, op, max_nnz)


def _choose(stream: SparseStream, comm: Communicator, op: Op, max_nnz: int) -> str:
    """Name the algorithm that "auto" stands for, from what all ranks know alike."""
    width = stream.values.shape[1:].numel()
    k = min(_rounded(max(1, max_nnz)), stream.size)
    itemsize = max(1, width * stream.values.element_size())
    return _fastest(stream.size, k, comm.size, itemsize, op.name is not None, comm.rates)


@lru_cache(maxsize=4096)
def _fastest(
    size: int, k: int, ranks: int, itemsize: int, by_engine: bool, rates: Rates | None
) -> str:
    """Name the fastest algorithm, as predicted; the engine's own only where it knows the operation.

    Remembered, since a prediction takes longer than a small sum.
    """
    rates = rates or cost.default_rates()
    here = min(ranks, rates.ranks_per_node)
    names = [name for name in ALGORITHMS if name != "dense" or by_engine]
    return cost.choose(names, cost.Problem(size, k, ranks, here, itemsize), rates)


def _rounded(count: int) -> int:
    """Round up to 4 significant bits, so that counts about alike are looked up as one."""
    dropped = max(0, count.bit_length() - 4)
    return -(-count >> dropped) << dropped


def check_algorithm(name: str, op: Op = SUM) -> None:
    """Raise `InputError` unless ``name`` is "auto" or in the table, and takes ``op``."""
    if name in ("gtopk", "oktopk"):
        raise InputError(
            f"{name} keeps only the k largest coordinates, so it is no all_reduce; call"
            f" sparcel.collectives.{name}(stream, comm, k), or train with the scheme {name!r}"
        )
    known(name, ["auto", *ALGORITHMS], "algorithm")
    if name == "dense" and op.name is None:
        raise InputError(
            "the engine's dense all-reduce knows sum, product, min and max alone;"
            " algorithm='recursive_doubling' takes any operation"
        )
