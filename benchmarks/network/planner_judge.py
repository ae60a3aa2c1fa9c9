"""Compares what `planner` measured with what the cost model predicts from each network's rates.

It can be run again after a change of the model. In each setting it judges three choices: among the
lossless sums, among the schemes, and among what the scheme `auto` chooses from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from sparcel.core.collectives import ALGORITHMS
from sparcel.core.cost import Problem, Rates, predict
from sparcel.core.formats import RAW, format_named
from sparcel.core.schemes.auto import CANDIDATES
from sparcel.tools.bench.contenders import STEP
from sparcel.tools.bench.predicted import formula_of

NEAR, GOOD = 0.25, 1.15
"""`NEAR` is the largest error of a close prediction, as a share of the measured time. `GOOD` is the
largest ratio of a good choice's time to the best time."""

Row = dict[str, Any]


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Compare the predictions of all rows with the measured times."""
    contests: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    repeats = []
    for place, network in enumerate(results["networks"]):
        rates = {name: Rates.from_json(json.dumps(one)) for name, one in network["rates"].items()}
        for row in network["rows"]:
            took, told = median(row["seconds"]), _predicted(row, rates[row["engine"]])
            errors[row["row"]].append(told / took - 1)
            if len(row["seconds"]) >= 4:
                repeats.append(_repeated(row["seconds"]))
            setting = tuple(row[key] for key in ("size", "density", "distribution", "engine"))
            for kind in _contests_of(row["row"]):
                contests[place, setting, kind].append((told, took))
    ratios = [min(c)[1] / min(took for _, took in c) for c in contests.values()]
    together = [error for row_errors in errors.values() for error in row_errors]
    return {
        "settings": len({key[:2] for key in contests}),
        "rows": len(together),
        "within 25 %": _near(together),
        "median error": median(together),
        "choices": len(ratios),
        "within 1.15 of the best": sum(ratio <= GOOD for ratio in ratios) / len(ratios),
        "worst choice": max(ratios),
        "repeated within 25 %": _near(repeats),
        "by row": {name: [_near(found), median(found)] for name, found in errors.items()},
    }


def _contests_of(name: str) -> list[str]:
    """Name the choices in which a row takes part."""
    if not name.startswith(STEP):
        return ["sum"] if name in ALGORITHMS else []
    scheme = name.removeprefix(STEP)
    return ["step"] * (scheme != "auto") + ["auto"] * (scheme in CANDIDATES)


def _near(errors: Sequence[float]) -> float:
    return sum(abs(error) <= NEAR for error in errors) / len(errors)


def _repeated(seconds: Sequence[float]) -> float:
    """Return how far the first half of a row's runs is from the second, by their medians."""
    half = len(seconds) // 2
    return median(seconds[:half]) / median(seconds[-half:]) - 1


def _predicted(row: Row, rates: Rates) -> float:
    """Return the predicted seconds of a row; the model knows no clusters any more."""
    formula = formula_of(row["row"])
    assert formula is not None, "only rows with a prediction were measured"
    known = {name: value for name, value in row["problem"].items() if name != "clusters"}
    format = format_named(known.pop("format", RAW.name))
    return predict(formula, Problem(**known, format=format), rates).seconds
