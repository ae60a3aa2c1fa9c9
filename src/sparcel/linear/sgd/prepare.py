"""From a rank's rows to a trainer that shares a model with the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparcel import _cpu
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.ranks import check_alike, gathered, run_or_fail_everywhere
from sparcel.linear.settings import SHARDED, Settings
from sparcel.linear.sgd.batches import TAIL, Batch, arrange, most_entries
from sparcel.linear.sgd.lossy import Lossy
from sparcel.linear.sgd.numbering import by_frequency
from sparcel.linear.sgd.replicated import Replicated
from sparcel.linear.sgd.sharded import Sharded
from sparcel.linear.sgd.solver import Sgd
from sparcel.linear.sgd.weights import Weights
from sparcel.rows import Rows, check
from sparcel.rows.rows import Array
from sparcel.schemes.density import count_for


def prepare(
    rows: Rows,
    targets: Array,
    row_weights: Array | None,
    width: int,
    settings: Settings,
    comm: Communicator | None = None,
    weights: Weights | None = None,
) -> Sgd:
    """Arrange a rank's rows for SGD and agree with the others on what they share.

    Parameters
    ----------
    rows, targets, row_weights
        This rank's; see `sparcel.linear.sgd.batches.arrange`. A rank may have none.
    width
        Number of classes that are told from the rest, 1 for two classes and for regression.
    comm
        The ranks; None for one alone. All of them call.
    weights
        The model to go on from, equal on all ranks, each of which keeps the whole; None for a new
        one.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows or the ranks' models differ in shape.
    """
    run_or_fail_everywhere(comm, lambda: check(rows))
    rank, dimensions = 0 if comm is None else comm.rank, rows.dimensions
    numbering = by_frequency(rows) if comm is None and weights is None else None
    order = np.random.default_rng([settings.random_state, rank]).permutation(len(rows))
    batches = run_or_fail_everywhere(
        comm,
        lambda: arrange(rows, targets, row_weights, settings.batch_size, order, numbering),
    )
    if weights is None:  # a whole training, which can wait for it
        _cpu.drop_kept()  # what reading and arranging took, as much as a piece of the rows
    dtype = rows.values.dtype
    weight = sum(batch.weight for batch in batches)
    check_alike(
        comm, len(batches), weight, dimensions, dtype, f"{settings.described()}, width={width}"
    )
    counts, entries = zip(
        *gathered(comm, [len(batches), most_entries(batches)], "batches"), strict=True
    )
    arguments = settings.weights(dimensions, width, dtype)
    model: Replicated | Sharded
    if settings.algorithm == SHARDED and comm is not None and weights is None:
        model = Sharded(arguments, batches, comm, settings.rounding())
    else:
        by = "auto" if settings.algorithm == SHARDED else settings.algorithm
        exchange = {"algorithm": by, "format": settings.format, "max_nnz": max(entries)}
        if numbering is not None:
            arguments["dimensions"] = len(numbering.columns)
        whole = weights or Weights(**arguments)
        if comm is not None and (settings.bits or settings.density):
            model = _lossy(settings, whole, batches, comm, exchange)
        else:
            columns = None if numbering is None else numbering.columns
            model = Replicated(whole, batches, comm, exchange, columns, dimensions)
    return Sgd(model, batches, counts, settings, comm)


def _lossy(
    settings: Settings,
    weights: Weights,
    batches: Sequence[Batch],
    comm: Communicator,
    exchange: dict[str, Any],
) -> Lossy:
    """Return a whole model on this rank, of whose gradients a part is sent."""
    rounding, count = settings.rounding(), None
    if rounding is not None and weights.width > 1:
        raise InputError(
            f"bits={settings.bits} goes with one class that is told from the rest where gradients"
            f" are summed on all ranks, got {weights.width} classes; leave out bits, or call fit"
            " with algorithm='sharded'"
        )
    if settings.density is not None:
        count = count_for(settings.density, weights.dimensions)
        exchange["max_nnz"] = min(exchange["max_nnz"], count + TAIL)
    return Lossy(weights, batches, comm, exchange, count, rounding)
