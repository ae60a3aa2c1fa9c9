"""Compares what `planner` measured with what the cost model predicts from each network's rates.

It can be run again after a change of the model, and on results of ``sparcel bench --rates --json``.
In each setting it judges three choices: among the lossless sums, among the schemes, and among what
the scheme `auto` chooses from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from sparcel.bench.contenders import STEP
from sparcel.bench.inputs import Case
from sparcel.bench.predicted import problem_of, stages_for
from sparcel.collectives import ALGORITHMS
from sparcel.cost import Problem, Rates, default_rates, predict
from sparcel.schemes.auto import CANDIDATES

NEAR, GOOD = 0.25, 1.15
"""`NEAR` is the largest error of a close prediction, as a share of the measured time. `GOOD` is the
largest ratio of a good choice's time to the best time."""

Row = dict[str, Any]


def judge(results: dict[str, Any], show: bool) -> dict[str, Any]:
    """Compare the predictions of all rows with the measured times; ``show`` prints each."""
    contests: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    repeats = []
    for place, network in enumerate(results.get("networks") or [network_of(results)]):
        rates = {name: Rates.from_json(json.dumps(one)) for name, one in network["rates"].items()}
        for row in network["rows"]:
            took, told = median(row["seconds"]), _predicted(row, rates[row["engine"]])
            errors[row["row"]].append(told / took - 1)
            if len(row["seconds"]) >= 4:
                repeats.append(_repeated(row["seconds"]))
            if show:
                _print(network, row, took, told)
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


def network_of(bench: dict[str, Any]) -> dict[str, Any]:
    """Return what ``sparcel bench`` saved as a network of `planner`; files cannot be read again."""
    here = bench["network"]["ranks_per_node"]
    cases: dict[tuple[Any, ...], Case] = {}
    rows = []
    for cell in bench["cells"]:
        where = cell["size"], cell["density"], cell["distribution"]
        if where[2] == "file":
            continue
        case = cases.setdefault(where, Case(*where, bench["world_size"]))
        name = cell["algorithm"]
        if stages_for(name, default_rates()) is None:
            continue
        asked = problem_of(name, case, here)
        problem = {key: getattr(asked, key) for key in ("size", "k", "ranks", "spread")}
        row = {key: cell[key] for key in ("size", "density", "distribution", "engine")}
        problem["ranks_per_node"] = here
        rows.append({**row, "row": name, "seconds": cell["seconds"]["all"], "problem": problem})
    rate = f"{bench['network']['rate_bits_per_s'] or 0:.3g}"
    network = {"nodes": bench["network"]["nodes"], "ranks_per_node": here, "rate": rate}
    return {**network, "rates": bench["rates"], "rows": rows}


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
    stages = stages_for(row["row"], rates)
    assert stages is not None, "only rows with a prediction were measured"
    known = {name: value for name, value in row["problem"].items() if name != "clusters"}
    return predict(stages, Problem(**known), rates).seconds


def _print(network: dict[str, Any], row: Row, took: float, told: float) -> None:
    print(
        f"{network['nodes']}x{network['ranks_per_node']} {network['rate']:8} {row['size']:>9}"
        f" {100 * row['density']:>5.3g} % {row['distribution']:9} {row['engine']:4}"
        f" {row['row']:20} measured {1e3 * took:10.3f} ms, predicted {1e3 * told:10.3f} ms,"
        f" {100 * (told / took - 1):+6.1f} %"
    )
