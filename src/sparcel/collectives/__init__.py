"""Collectives: algorithms over streams, one file each, to be read beside its paper.

A collective is a plain function from a stream and a `sparcel.wire.Wire` to a stream. Its file also
holds its ``steps``: its exchanges and its work, for the cost model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from sparcel.collectives.all_gather import all_gather
from sparcel.collectives.all_gather import steps as all_gather_steps
from sparcel.collectives.allgather_reduce import allgather
from sparcel.collectives.allgather_reduce import steps as allgather_steps
from sparcel.collectives.broadcast import broadcast
from sparcel.collectives.broadcast import steps as broadcast_steps
from sparcel.collectives.dense import dense
from sparcel.collectives.dense import steps as dense_steps
from sparcel.collectives.gtopk import GlobalTopk, gathered_topk, gathered_topk_steps, gtopk
from sparcel.collectives.gtopk import steps as gtopk_steps
from sparcel.collectives.halving_doubling import halving_doubling
from sparcel.collectives.halving_doubling import steps as halving_doubling_steps
from sparcel.collectives.oktopk import oktopk
from sparcel.collectives.oktopk import steps as oktopk_steps
from sparcel.collectives.oktopk_reuse import Estimates, oktopk_reuse
from sparcel.collectives.recursive_doubling import recursive_doubling
from sparcel.collectives.recursive_doubling import steps as recursive_doubling_steps
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.collectives.reduce_scatter import steps as reduce_scatter_steps
from sparcel.collectives.ring import ring
from sparcel.collectives.ring import steps as ring_steps
from sparcel.collectives.split_allgather import (
    Quantized,
    quantized_split_allgather,
    split_allgather,
)
from sparcel.collectives.split_allgather import steps as split_allgather_steps
from sparcel.errors import InputError, known
from sparcel.ops import SUM, Op
from sparcel.steps import Steps
from sparcel.stream import SparseStream
from sparcel.wire import Wire

__all__ = [
    "ALGORITHMS",
    "OTHER_STEPS",
    "Algorithm",
    "Estimates",
    "GlobalTopk",
    "Quantized",
    "Reduction",
    "all_gather",
    "broadcast",
    "check_algorithm",
    "gathered_topk",
    "gtopk",
    "oktopk",
    "oktopk_reuse",
    "quantized_split_allgather",
    "reduce_scatter",
]

Reduction: TypeAlias = Callable[[SparseStream, Wire, Op, int | None], SparseStream]
"""``(stream, wire, op, max_nnz) -> reduced stream``. All ranks call it and get the same result.

``max_nnz`` bounds the entries of every rank's stream, or is None; all ranks pass the same value.
"""


class Algorithm(NamedTuple):
    """An all-reduce of streams: the function, and its steps for the cost model."""

    reduce: Reduction
    steps: Steps


ALGORITHMS: dict[str, Algorithm] = {
    "dense": Algorithm(dense, dense_steps),
    "allgather": Algorithm(allgather, allgather_steps),
    "recursive_doubling": Algorithm(recursive_doubling, recursive_doubling_steps),
    "halving_doubling": Algorithm(halving_doubling, halving_doubling_steps),
    "split_allgather": Algorithm(split_allgather, split_allgather_steps),
    "ring": Algorithm(ring, ring_steps),
}
"""The algorithms of `sparcel.all_reduce`, by name."""

OTHER_STEPS: dict[str, Steps] = {
    "gtopk": gtopk_steps,
    "gathered_topk": gathered_topk_steps,
    "oktopk": oktopk_steps,
    "all_gather": all_gather_steps,
    "reduce_scatter": reduce_scatter_steps,
    "broadcast": broadcast_steps,
}
"""The steps of the collectives that are not an all-reduce, by name."""


def check_algorithm(name: str, op: Op = SUM) -> None:
    """Raise `InputError` unless ``name`` is "auto" or in the table, and takes ``op``."""
    if name in ("gtopk", "oktopk"):
        raise InputError(
            f"{name} keeps only the k largest coordinates, so it is not an all_reduce; call"
            f" sparcel.collectives.{name}(stream, wire, k), or train with the scheme {name!r}"
        )
    known(name, ["auto", *ALGORITHMS], "algorithm")
    if name == "dense" and op.name is None:
        raise InputError(
            "the engine's dense all-reduce supports only sum, product, min and max;"
            " algorithm='recursive_doubling' takes any operation"
        )
