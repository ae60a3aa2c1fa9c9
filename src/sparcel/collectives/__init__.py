"""Collectives: algorithms over streams, one file each, to be read beside its paper.

A collective is a plain function from a stream and a `sparcel.wire.Wire` to a stream. Its file also
holds its ``stages``: its exchanges and its work, for the cost model. Its rounds, messages and bytes
stand in docs/explanation/algorithms.md alone, whose formulas tests compare with what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from sparcel.collectives.all_gather import all_gather
from sparcel.collectives.all_gather import stages as all_gather_stages
from sparcel.collectives.allgather_reduce import allgather
from sparcel.collectives.allgather_reduce import stages as allgather_stages
from sparcel.collectives.broadcast import broadcast
from sparcel.collectives.broadcast import stages as broadcast_stages
from sparcel.collectives.dense import dense
from sparcel.collectives.dense import stages as dense_stages
from sparcel.collectives.gtopk import GlobalTopk, gathered_topk, gathered_topk_stages, gtopk
from sparcel.collectives.gtopk import stages as gtopk_stages
from sparcel.collectives.halving_doubling import halving_doubling
from sparcel.collectives.halving_doubling import stages as halving_doubling_stages
from sparcel.collectives.oktopk import check_selectable, oktopk
from sparcel.collectives.oktopk import stages as oktopk_stages
from sparcel.collectives.oktopk_reuse import Estimates, oktopk_reuse
from sparcel.collectives.recursive_doubling import recursive_doubling
from sparcel.collectives.recursive_doubling import stages as recursive_doubling_stages
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.collectives.reduce_scatter import stages as reduce_scatter_stages
from sparcel.collectives.ring import ring
from sparcel.collectives.ring import stages as ring_stages
from sparcel.collectives.split_allgather import split_allgather
from sparcel.collectives.split_allgather import stages as split_allgather_stages
from sparcel.errors import InputError, checked_name
from sparcel.ops import SUM, Op
from sparcel.stages import Stages
from sparcel.stream import SparseStream
from sparcel.wire import Wire

__all__ = [
    "ALGORITHMS",
    "OTHER_STAGES",
    "SELECTING",
    "Algorithm",
    "Estimates",
    "GlobalTopk",
    "Reduction",
    "all_gather",
    "broadcast",
    "check_algorithm",
    "check_selectable",
    "gathered_topk",
    "gtopk",
    "oktopk",
    "oktopk_reuse",
    "reduce_scatter",
]

Reduction: TypeAlias = Callable[[SparseStream, Wire, Op, int | None], SparseStream]
"""``(stream, wire, op, max_nnz) -> reduced stream``. All ranks call it and get the same result.

``max_nnz`` bounds the entries of every rank's stream, or is None; all ranks pass the same value.
"""


class Algorithm(NamedTuple):
    """An all-reduce of streams: the function, and its stages for the cost model."""

    reduce: Reduction
    stages: Stages


ALGORITHMS: dict[str, Algorithm] = {
    "dense": Algorithm(dense, dense_stages),
    "allgather": Algorithm(allgather, allgather_stages),
    "recursive_doubling": Algorithm(recursive_doubling, recursive_doubling_stages),
    "halving_doubling": Algorithm(halving_doubling, halving_doubling_stages),
    "split_allgather": Algorithm(split_allgather, split_allgather_stages),
    "ring": Algorithm(ring, ring_stages),
}
"""The algorithms of `sparcel.all_reduce`, by name."""

SELECTING: dict[str, Callable[[SparseStream, Wire, int, int | None], GlobalTopk]] = {
    "oktopk": oktopk,
    "gtopk": lambda stream, wire, k, _: gtopk(stream, wire, k),
    "gathered_topk": gathered_topk,
}
"""The algorithms of `sparcel.all_reduce_topk`, by name: ``(stream, wire, k, max_nnz)``."""

OTHER_STAGES: dict[str, Stages] = {
    "gtopk": gtopk_stages,
    "gathered_topk": gathered_topk_stages,
    "oktopk": oktopk_stages,
    "all_gather": all_gather_stages,
    "reduce_scatter": reduce_scatter_stages,
    "broadcast": broadcast_stages,
}
"""The stages of the collectives that are not an all-reduce, by name."""


def check_algorithm(name: str, op: Op = SUM) -> None:
    """Raise `InputError` unless ``name`` is "auto" or in the table, and takes ``op``."""
    if name in ("gtopk", "oktopk"):
        raise InputError(
            f"{name} keeps only the k largest coordinates, so it is not an all_reduce; call"
            f" sparcel.all_reduce_topk(stream, k, algorithm={name!r}), or train with the scheme"
            f" {name!r}"
        )
    checked_name(name, ["auto", *ALGORITHMS], "algorithm")
    if name == "dense" and op.name is None:
        raise InputError(
            "the engine's dense all-reduce supports only sum, product, min and max;"
            " algorithm='recursive_doubling' takes any operation"
        )
