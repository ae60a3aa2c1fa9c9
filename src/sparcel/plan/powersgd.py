"""torch's PowerSGD hook, which users would take instead: what it sends and computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil

from sparcel.cost import Problem
from sparcel.stages import EngineSum, Stage, Stages, Work

POWERSGD = "PowerSGD 4"
"""With matrices of rank 4 in place of each matrix."""

_RANK = 4
_PASSES = 30
"""What its products, its error feedback and its copies take, in passes of adding two vectors: about
as long as on an H100, the host's time included (docs/how-to/gpu.md), and on a core of a CPU."""


def powersgd_stages(parameters: int) -> Stages:
    """Return the stages of a step of a model with so many parameters.

    Its matrices are taken to be square, with sides of twice the cube root of the parameters. So it
    sends 25 % more than GPT-2's shapes ask for, and 5 % more than those of ResNet-50 and GPT-2 XL.
    """
    return partial(_stages, 2 * parameters ** (1 / 3))


def _stages(side: float, problem: Problem) -> Iterator[Stage]:
    """Yield the sum of a left factor of each matrix, and then of a right one."""
    yield Work("add", problem.size, times=_PASSES)
    for _ in range(2):
        values = ceil(_RANK * problem.size / side)
        yield EngineSum(values, 4, problem.rank, problem.ranks)
