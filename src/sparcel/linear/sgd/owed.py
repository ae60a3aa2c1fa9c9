"""What a rank has not sent yet of its gradients: the error feedback of top-k."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sparcel import kernels
from sparcel.comm import Communicator
from sparcel.linear.ranks import collect, gathered, scattered
from sparcel.linear.sgd.weights import Weights
from sparcel.ops import SUM
from sparcel.rows.rows import Array
from sparcel.stream import SparseStream


class Owed:
    """What a rank keeps back of its gradients, at each coordinate of the model.

    A step looks at the columns of its batch alone, so it costs what these cost. What is owed
    elsewhere waits for a batch that has those columns. (`sparcel.memory.Memory` selects among all
    coordinates, and reads them all in each step; and it knows no rows of several classes.)

    Parameters
    ----------
    weights
        The model, whose shape and dtype are those of what is owed.
    most
        How many columns a step sends.
    """

    def __init__(self, weights: Weights, most: int) -> None:
        shape = (weights.dimensions, weights.width)
        dtype = torch.from_numpy(np.empty(0, weights.dtype)).dtype
        self.values = torch.zeros(shape[:1] if weights.width == 1 else shape, dtype=dtype)
        self._most = most

    def take(self, columns: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Take out the columns with most of what is owed and the gradient; keep the rest.

        Parameters
        ----------
        columns
            ``[count]`` increasing.
        gradient
            ``[count]``, or ``[count, width]``: a column then counts by the norm of its row.

        Returns
        -------
        tuple
            The columns, increasing, and the values there.
        """
        total = self.values.index_select(0, columns).add_(gradient)
        sizes = total if total.ndim == 1 else total.norm(dim=1)
        chosen, _ = kernels.topk(sizes, self._most)
        taken = total.index_select(0, chosen)
        total.index_fill_(0, chosen.long(), 0)
        kernels.scatter(self.values, columns, total)
        return columns.index_select(0, chosen), taken

    def give_back(self, lost: SparseStream) -> None:
        """Owe what rounding took as well."""
        if lost.indices is None:
            self.values += lost.values
        else:
            kernels.scatter_reduce(self.values, lost.indices, lost.values, SUM)

    def state(self, comm: Communicator) -> dict[str, Array]:
        """Return what all ranks owe, one after the other, complete on rank 0; all ranks call."""
        values = self.values.numpy()
        columns = np.flatnonzero(values if values.ndim == 1 else values.any(axis=1))
        counts = gathered(comm, len(columns), "number of debts")
        state = {"owed_ends": np.cumsum([0, *counts])}
        for name, own in (("owed_columns", columns), ("owed", values[columns])):
            length = sum(counts) if comm.rank == 0 else 0
            state[name] = np.empty((length, *own.shape[1:]), own.dtype)
            collect(own, state[name], counts, False, comm)
        return state

    def restore(self, state: Mapping[str, Array], comm: Communicator) -> None:
        """Take over what this rank owed, of what rank 0 gives; all ranks call."""
        given = np.diff(state["owed_ends"]).tolist() if comm.rank == 0 else None
        counts = gathered(comm, given, "number of debts")[0]
        values = self.values.numpy()
        nothing = {"owed_columns": np.empty(0, np.int64), "owed": values[:0]}
        columns, owed = (
            scattered(state[name] if comm.rank == 0 else none, counts, comm)
            for name, none in nothing.items()
        )
        values.fill(0)
        values[columns] = owed
