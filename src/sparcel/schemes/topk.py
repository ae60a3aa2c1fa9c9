"""Top-k SGD: every rank sends its k largest coordinates, and the whole sum is applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from sparcel import auto
from sparcel.collectives import check_algorithm
from sparcel.rates import Rates
from sparcel.schemes._stages import apply_stages, select_stages
from sparcel.schemes.exchange import Exchanged, Selection
from sparcel.schemes.sparsifier import Selecting
from sparcel.stages import Problem, Stage, Stages
from sparcel.wire import Wire


def exchange_topk(selection: Selection, wire: Wire, algorithm: str = "auto") -> Exchanged:
    """Sum the ranks' selections; nothing goes back to memory."""
    sent = selection.stream
    return Exchanged(auto.all_reduce(sent, wire, algorithm=algorithm, max_nnz=selection.most), sent)


@dataclass(eq=False)
class TopK(Selecting):
    """The sum of the ranks' selections, with error feedback.

    Parameters
    ----------
    algorithm
        The all-reduce that sums the selections, as in `sparcel.all_reduce`.

    The others are those of `Selecting`.
    Source: gTop-k, Algorithm 1 (its baseline, after Dryden et al. and Lin et al.).
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_algorithm(self.algorithm)

    def _exchange(self, selection: Selection, wire: Wire) -> Exchanged:
        return exchange_topk(selection, wire, self.algorithm)


def stages_by(rates: Rates) -> Stages:
    """Return the stages of a step of `TopK` with ``algorithm="auto"`` and these rates."""
    return partial(stages, auto.stages_by(rates))


def stages(exchange: Stages, problem: Problem) -> Iterator[Stage]:
    """Yield the stages of a step that sums the ranks' selections by ``exchange``."""
    yield from select_stages(problem)
    yield from exchange(problem)
    yield from apply_stages(problem, problem.entries(problem.everyone))
