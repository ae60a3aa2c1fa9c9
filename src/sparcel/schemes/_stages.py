"""The stages that schemes share: selecting, and applying the update."""

from __future__ import annotations

from collections.abc import Iterator

from sparcel.stages import Problem, Stage, Work, chosen, scattered

STEP_OPERATIONS = 250
"""Small operations of a step, besides those on its vectors: checks, layers, the transaction."""


def select_stages(problem: Problem) -> Iterator[Stage]:
    """Yield the stages that add the gradient to the memory and take the k largest out."""
    yield Work("small", STEP_OPERATIONS)
    yield Work("select", problem.size)
    yield chosen(problem.k)


def apply_stages(problem: Problem, entries: float) -> Iterator[Stage]:
    """Yield the stages that write an average of ``entries`` coordinates and apply the update."""
    if problem.is_dense(entries):
        yield Work("add", problem.size)
    else:
        yield Work("add", problem.size)
        yield scattered(entries)
    yield Work("add", problem.size)
