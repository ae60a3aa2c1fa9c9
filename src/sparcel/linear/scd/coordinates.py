"""A rank's rows arranged by columns, once, and the order in which coordinates are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparcel import _cpu, api
from sparcel.comm import Communicator
from sparcel.linear.trainer import Examples
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class RowsByColumn:
    """A rank's rows, by the columns that occur on any rank; the coordinates of all others stay 0.

    Coordinate i of the model is that of ``columns[i]``. An intercept is one more coordinate, the
    last, whose column is 1 in each row.

    Attributes
    ----------
    columns
        ``[coordinates]``, without the intercept's; increasing, and equal on all ranks.
    entries
        The rows, their targets and weights. A copy: each entry takes its value and four bytes,
        each coordinate eight bytes.
    size, nnz
        Number of coordinates, and of entries.
    """

    columns: Array
    entries: _cpu.LinearShard
    size: int
    nnz: int


def by_coordinates(
    examples: Examples, fit_intercept: bool, comm: Communicator | None
) -> RowsByColumn:
    """Arrange a rank's rows by columns; all ranks call, and learn which columns occur on any."""
    rows, targets, weights = examples.rows, examples.targets, examples.weights
    ones = len(rows) if fit_intercept else 0
    starts = np.empty(rows.dimensions + 1, np.int64)
    places = np.empty(rows.nnz + ones, np.int32)
    values = np.empty(rows.nnz + ones, rows.values.dtype)
    _cpu.transpose(
        *(rows.offsets, rows.columns, rows.values, starts, places, values),
        threads=torch.get_num_threads(),
    )
    places[rows.nnz :], values[rows.nnz :] = np.arange(ones), 1
    columns = _on_any_rank(np.flatnonzero(np.diff(starts)), rows.dimensions, comm)
    ends = [rows.nnz, rows.nnz + ones] if fit_intercept else [rows.nnz]
    # A column ends where the next one begins that occurs; those between have no entries.
    offsets = np.concatenate([starts[columns], ends])
    entries = _cpu.LinearShard(offsets, places, values, targets, weights, examples.width)
    return RowsByColumn(columns, entries, len(offsets) - 1, len(places))


def _on_any_rank(own: Array, dimensions: int, comm: Communicator | None) -> Array:
    if comm is None:
        return own
    ones = torch.ones(len(own), dtype=torch.int32)
    union = api.all_reduce(SparseStream(torch.from_numpy(own), ones, dimensions), "max", group=comm)
    found = (union.values == 1).nonzero()[:, 0] if union.indices is None else union.indices
    return found.numpy()


def draws(seed: int, epoch: int, slices: Array, steps: int) -> list[Array]:
    """Divide the coordinates into those of each step of an epoch, at random.

    Every coordinate occurs once. Each step takes about as many from each slice of the model. The
    result depends on the arguments alone, so all ranks know it.

    Parameters
    ----------
    slices
        ``[ranks + 1]``, where the slices begin and the last one ends.

    Returns
    -------
    list of ndarray
        For each step its coordinates, increasing.
    """
    random = np.random.default_rng([seed, epoch])
    step = np.concatenate(
        [random.permutation(size) * steps // max(size, 1) for size in np.diff(slices)]
    )
    # numpy sorts narrow integers fastest.
    order = np.argsort(step.astype(np.min_scalar_type(steps - 1)), kind="stable")
    return np.split(order, np.cumsum(np.bincount(step, minlength=steps))[:-1])
