"""What rounding takes of the directions of a matrix, and what Muon then does with them.

    python -m benchmarks.training.singular DATA

Muon trains the small model of ``code`` by exact averages of eight ranks' gradients. Beside them the
same gradients go through a scheme, and both averages through momentum. At the end the momentum of a
matrix has singular values from large to small, and the two updates that Muon makes of the two are
compared along its singular vectors: by tenths of the values, the mean over the layers' matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

import sparcel
from benchmarks.pages.tables import table
from benchmarks.record import Row, grid, run_all, runs_told
from benchmarks.training.convergence import RANKS
from benchmarks.training.frontier import method_of
from benchmarks.training.task_training import Method, Run
from benchmarks.training.tasks import TASKS
from sparcel.core.comm import Communicator

TASK, STEPS, MOMENTUM, TENTHS = "code, Muon", 150, 0.95, 10
RUNS = {
    **{f"bidirectional,1,packed:{bits}": f"all in {bits} bits" for bits in (4, 6, 8)},
    "bidirectional,0.1/0.3,packed:4": "10 %, and 30 % of the sums back, in 4 bits",
}
"""What travels, with labels."""
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315), 5, 1e-7
"""Coefficients, steps and eps, the defaults of ``torch.optim.Muon``."""


class Beside(Run):
    """A dense training, beside which a scheme averages the gradients of Muon's matrices."""

    def __init__(self, data: Path, run: str, seed: int) -> None:
        super().__init__(data, TASKS[TASK], Method("dense", "dense", ahead=False), seed)
        self.beside = method_of(run).make()
        muon = {id(one) for group in self.optimizers[0].param_groups for one in group["params"]}
        self.matrices = [name for name, parameter in self.named.items() if id(parameter) in muon]
        self.exact = {name: torch.zeros_like(self.named[name]) for name in self.matrices}
        self.rounded = {name: torch.zeros_like(self.named[name]) for name in self.matrices}

    def rank(self, comm: Communicator) -> None:  # type: ignore[override]
        own, averages = self.beside.fresh(), self.averager(comm)
        for step, part in enumerate(self.parts(comm)):
            if step == STEPS:
                return
            gradients, _ = self.gradients(part, {})
            large = torch.cat([gradients[name].flatten() for name in self.matrices])
            update = own.step(large, comm)
            updates = averages.average(gradients)
            if comm.rank == 0:
                sizes = [self.named[name].numel() for name in self.matrices]
                for name, one in zip(self.matrices, update.split(sizes), strict=True):
                    self.rounded[name].lerp_(one.view_as(self.named[name]), 1 - MOMENTUM)
                    self.exact[name].lerp_(updates[name], 1 - MOMENTUM)
                self.apply(updates, step)
            comm.gather_numbers(0)  # the model has changed


def compared(exact: Tensor, rounded: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Return by tenths the singular values, and both errors along the singular vectors.

    The first error is that of the momentum, the second that of Muon's update, each as a share of
    what the vectors have of it.
    """
    left, values, right = torch.linalg.svd(exact, full_matrices=False)

    def along(matrix: Tensor) -> Tensor:
        return (left.T @ matrix @ right.T).diagonal()

    whole, other = (
        _zeropower_via_newtonschulz(one, *NEWTON_SCHULZ).float() for one in (exact, rounded)
    )
    errors = [
        (along(rounded - exact).abs() / values),
        ((left.T @ (other - whole)).norm(dim=1) / (left.T @ whole).norm(dim=1)),
    ]
    tenths = [values / values[0], *errors]
    return tuple([float(part.mean()) for part in one.tensor_split(TENTHS)] for one in tenths)  # type: ignore[return-value]


def measured(data: Path, run: str, seed: int) -> Row:
    """Train once beside a scheme, and return the row."""
    training = Beside(data, run, seed)
    sparcel.simulate(RANKS, training.rank)
    found = [compared(training.exact[name], training.rounded[name]) for name in training.matrices]
    names = ("values", "momentum_errors", "update_errors")
    columns = (torch.tensor(one).mean(0).tolist() for one in zip(*found, strict=True))
    return dict(zip(names, columns, strict=True))


SHOWN = {"largest": 0, "third": 2, "fifth": 4, "seventh": 6, "ninth": 8}
"""Tenths of the singular values, by what a page calls them."""


def errors_table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the errors of Muon's updates, by what travels."""
    cells = (
        [RUNS[row["run"]], *(f"{row['update_errors'][tenth]:.0%}" for tenth in SHOWN.values())]
        for row in rows
    )
    return table(("what travels", *(f"{name} tenth" for name in SHOWN)), cells)


def main() -> None:
    told = runs_told(__doc__, "singular", runs=list(RUNS), seeds=[0])
    run_all(told, measured, grid(seed=told.seeds, run=told.runs))


if __name__ == "__main__":
    main()
