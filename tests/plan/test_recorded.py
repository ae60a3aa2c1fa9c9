"""What a plan says of accuracy is what the record holds."""

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from sparcel.plan.planner import SPARSE
from sparcel.plan.recorded import RANKS, RECORDED, STEPS, TASKS, UNNAMED
from sparcel.schemes import DEFAULT, ON_NODES, RECOMMENDED, SEND_ALL

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
FRONTIER = f"{DEFAULT},{RECOMMENDED['density']},{RECOMMENDED['format']},front"
NAMES = {"hitopk": "hitopk 2×4", UNNAMED: FRONTIER}
"""What the records call the methods."""


def test_every_method_that_a_plan_may_recommend_is_recorded():
    assert set(RECORDED) == {*SPARSE, *ON_NODES, UNNAMED} - set(SEND_ALL)


@pytest.mark.parametrize("method", RECORDED)
def test_losses_are_those_of_the_record(method):
    records = (RESULTS / f"{name}.json" for name in ("convergence", "frontier"))
    rows = [row for record in records for row in json.loads(record.read_text())["rows"]]
    rows = [row for row in rows if (row["steps"], row["ranks"]) == (STEPS, RANKS)]
    rows = [row for row in rows if "method" in row]  # other rows are of torch's hooks
    recorded = RECORDED[method]
    dense = {(row["task"], row["seed"]): row for row in rows if row["method"] == "dense"}
    name = NAMES.get(method, method)
    for task, points in zip(TASKS, recorded.points, strict=True):
        runs = [row for row in rows if (row["task"], row["method"]) == (task, name)]
        runs = [row for row in runs if row["seed"] < recorded.seeds]
        assert len(runs) == recorded.seeds
        assert all(row["settings"]["density"] == recorded.density for row in runs)
        assert all(row["ahead"] and row["frontload"] for row in runs)
        beside = [(row, dense[task, row["seed"]]) for row in runs]
        gained = mean(100 * (row["accuracy"] - base["accuracy"]) for row, base in beside)
        assert round(gained, 2) == points
        if task == "words":
            more = math.exp(mean(row["loss"] - base["loss"] for row, base in beside)) - 1
            assert round(100 * more, 1) == recorded.perplexity
