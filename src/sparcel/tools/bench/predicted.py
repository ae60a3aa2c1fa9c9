"""Predictions of the cost model for cells, and their comparison with the measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sparcel.core.collectives import ALGORITHMS
from sparcel.core.cost import (
    COLLECTIVES,
    STEPS,
    Problem,
    Rates,
    measure,
    predict,
    read_rates,
)
from sparcel.core.cost.formulas import fastest_sum
from sparcel.core.cost.predict import Formula, expected_union
from sparcel.core.cost.steps import engine_sum
from sparcel.core.formats import RAW, Format
from sparcel.errors import checked_name
from sparcel.tools.bench.contenders import DENSE, STEP, BenchEngine
from sparcel.tools.bench.inputs import Case
from sparcel.tools.bench.results import Cell

NOW = "now"
"""Stands for a file of rates: measure them first."""

_CLOSE = 0.25


def set_rates(engines: Sequence[BenchEngine], sources: Mapping[str, str]) -> dict[str, Rates]:
    """Give the engines' communicators their rates, by which ``auto`` chooses; all ranks call.

    Returns the rates by engine, from a file or measured now.

    Parameters
    ----------
    sources
        By engine, a file that `sparcel plan --measure` saved, or `NOW`; "" stands for all other
        engines.

    Raises
    ------
    InputError
        When an engine is not in this run, or a file holds no rates.
    """
    names = [engine.name for engine in engines]
    for name in filter(None, sources):
        checked_name(name, names, "engine")
    rates = {}
    for engine in engines:
        source = sources.get(engine.name, sources.get(""))
        if source == NOW:
            rates[engine.name] = measure(engine.comm, engine.name)
        elif source is not None:
            rates[engine.name] = read_rates(source)
        engine.comm.rates = rates.get(engine.name)
    return rates


def predicted(
    name: str, case: Case, ranks_per_node: int, rates: Rates | None, format: Format = RAW
) -> float | None:
    """Return the predicted seconds of the row ``name``, or None without a prediction."""
    formula = formula_of(name)
    if rates is None or formula is None:
        return None
    return predict(formula, problem_of(name, case, ranks_per_node, format), rates).seconds


def problem_of(name: str, case: Case, ranks_per_node: int, format: Format = RAW) -> Problem:
    """Return the problem that the row ``name`` of a case solves."""
    dense = name in DENSE
    return Problem(
        size=case.size,
        k=case.size if dense else case.k,
        ranks=case.ranks,
        ranks_per_node=ranks_per_node,
        spread=None if dense else _spread(case),
        format=format,
    )


def formula_of(name: str) -> Formula | None:
    """Return the formula of the row ``name``, or None if there is none."""
    if name in DENSE:
        return engine_sum(DENSE[name].itemsize)
    if name.startswith(STEP):
        return STEPS.get(name.removeprefix(STEP))
    return fastest_sum if name == "auto" else COLLECTIVES.get(name)


def _spread(case: Case) -> int:
    """Return the size of a vector in which independent choices have as large a union as these."""
    union = case.total.indices.numel()
    low, high = case.k, case.size
    while low < high:
        middle = (low + high) // 2
        if expected_union(middle, case.k, case.ranks) < union:
            low = middle + 1
        else:
            high = middle
    return low


def verdict(cells: Sequence[Cell]) -> str:
    """Say how many predictions are close and how good their choices are; empty without any."""
    ratios = [cell.predicted / cell.median for cell in cells if cell.predicted is not None]
    if not ratios:
        return ""
    close = sum(abs(ratio - 1) <= _CLOSE for ratio in ratios)
    told = f"{close} of {len(ratios)} predictions within {100 * _CLOSE:.0f} % of the measured time"
    cases: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.predicted is not None and cell.algorithm in ALGORITHMS:
            key = (cell.engine, cell.size, cell.density, cell.distribution)
            cases[key].append(cell)
    regrets = [
        min(case, key=lambda cell: cell.predicted or 0.0).median / min(c.median for c in case)
        for case in cases.values()
        if len(case) > 1
    ]
    if regrets:
        told += (
            "; the sum predicted to be the fastest took at most"
            f" {max(regrets):.2f}× the time of the fastest"
        )
    return told
