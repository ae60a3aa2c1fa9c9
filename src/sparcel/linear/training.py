"""From a rank's rows to what trains a model on them, with the other ranks or alone."""

from __future__ import annotations

import numpy as np

from sparcel import _cpu
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.ranks import check_alike, gathered, run_or_fail_everywhere
from sparcel.linear.scd.solver import Scd
from sparcel.linear.settings import SHARDED, Settings
from sparcel.linear.sgd.batches import TAIL, Batch, arrange, most_entries
from sparcel.linear.sgd.numbering import Numbering, by_frequency
from sparcel.linear.sgd.replicated import Exchange, Replicated
from sparcel.linear.sgd.sharded import Sharded
from sparcel.linear.sgd.solver import Sgd
from sparcel.linear.sgd.weights import Weights
from sparcel.linear.trainer import Examples, Trainer
from sparcel.rows import check
from sparcel.schemes.density import count_for


def make_trainer(examples: Examples, settings: Settings, comm: Communicator | None) -> Trainer:
    """Return what trains a new model by the solver that was chosen; all ranks call.

    Raises
    ------
    InputError
        On all ranks, when no rank has rows, or they differ in shape or settings.
    """
    make = prepare if settings.solver == "sgd" else Scd
    return make(examples, settings, comm)


def prepare(
    examples: Examples,
    settings: Settings,
    comm: Communicator | None = None,
    weights: Weights | None = None,
) -> Sgd:
    """Arrange a rank's rows for SGD and agree with the others on what they share.

    Parameters
    ----------
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
    rows, width = examples.rows, examples.width

    def arranged() -> tuple[Numbering | None, list[Batch]]:
        check(rows)
        numbering = by_frequency(rows) if comm is None and weights is None else None
        seed = [settings.random_state, 0 if comm is None else comm.rank]
        order = np.random.default_rng(seed).permutation(len(rows))
        size, given = settings.batch_size, (rows, examples.targets, examples.weights)
        return numbering, arrange(*given, size, order, numbering)

    numbering, batches = run_or_fail_everywhere(comm, arranged)
    if weights is None:
        _cpu.drop_kept()  # buffers of reading and arranging, which a single pass would need again
    _, mean, spread = check_alike(examples, settings, comm)
    told = gathered(comm, [len(batches), most_entries(batches)], "batches")
    counts, entries = zip(*told, strict=True)
    empty = settings.weights(width, rows.values.dtype)

    def make_sgd(model: Replicated | Sharded) -> Sgd:
        model.weights.begin(mean, spread)
        return Sgd(model, batches, counts, settings, comm)

    if settings.algorithm == SHARDED and comm is not None and weights is None:
        return make_sgd(Sharded(empty, rows.dimensions, batches, comm, settings.rounding()))
    algorithm = "auto" if settings.algorithm == SHARDED else settings.algorithm
    exchange = Exchange(algorithm, settings.format, max(entries))
    if comm is not None and settings.density is not None:
        count = count_for(settings.density, rows.dimensions)
        exchange = exchange._replace(sent=count, max_nnz=min(max(entries), count + TAIL))
    if comm is not None and settings.bits is not None:
        if width > 1:
            raise InputError(
                f"bits={settings.bits} goes with one class that is told from the rest where"
                f" gradients are summed on all ranks, got {width} classes; leave out bits, or call"
                " fit with algorithm='sharded'"
            )
        exchange = exchange._replace(rounding=settings.rounding())
    columns = None if numbering is None else numbering.columns
    whole = weights or empty.sized(rows.dimensions if columns is None else len(columns))
    return make_sgd(Replicated(whole, batches, comm, exchange, columns, rows.dimensions))
