"""Collectives: algorithms over streams, to be read beside their papers.

A collective is a plain function from a stream and a `Wire` to a stream. Its rounds,
messages and bytes stand in docs/explanation/algorithms.md alone, whose formulas tests compare with
what is counted; `cost.formulas` has what they are expected to be, and the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from sparcel.core.collectives.all_reduce import (
    all_gather,
    allgather,
    dense,
    reduce_scatter,
    ring,
    split_allgather,
)
from sparcel.core.collectives.broadcast import broadcast
from sparcel.core.collectives.doubling import halving_doubling, recursive_doubling
from sparcel.core.collectives.gtopk import GlobalTopk, gathered_topk, gtopk
from sparcel.core.collectives.oktopk import Estimates, check_selectable, oktopk, oktopk_reuse
from sparcel.core.ops import SUM, Op
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name

__all__ = [
    "ALGORITHMS",
    "SELECTING",
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

ALGORITHMS: dict[str, Reduction] = {
    "dense": dense,
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "split_allgather": split_allgather,
    "ring": ring,
}
"""The algorithms of `sparcel.all_reduce`, by name."""


SELECTING: dict[str, Callable[[SparseStream, Wire, int, int | None], GlobalTopk]] = {
    "oktopk": oktopk,
    "gtopk": lambda stream, wire, k, _: gtopk(stream, wire, k),
    "gathered_topk": gathered_topk,
}
"""The algorithms of `sparcel.all_reduce_topk`, by name: ``(stream, wire, k, max_nnz)``."""


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
