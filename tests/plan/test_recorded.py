"""What a plan says of accuracy is what the record holds."""

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from sparcel.plan.planner import SPARSE
from sparcel.plan.recorded import DENSITY, RANKS, RECORDED, STEPS, TASKS
from sparcel.schemes import ON_NODES, SEND_ALL

RECORD = Path(__file__).parents[2] / "benchmarks/results/convergence.json"
NAMES = {"hitopk": "hitopk 2×4"}


def test_every_method_that_a_plan_may_recommend_is_recorded():
    assert set(RECORDED) == {*SPARSE, *ON_NODES} - set(SEND_ALL)


@pytest.mark.parametrize("method", RECORDED)
def test_losses_are_those_of_the_record(method):
    rows = json.loads(RECORD.read_text())["rows"]
    dense = {(row["task"], row["seed"]): row for row in rows if row["method"] == "dense"}
    name = NAMES.get(method, method)
    for task, points in zip(TASKS, RECORDED[method].points, strict=True):
        runs = [row for row in rows if (row["task"], row["method"]) == (task, name)]
        assert len(runs) == RECORDED[method].seeds
        assert {(row["steps"], row["ranks"]) for row in runs} == {(STEPS, RANKS)}
        assert all(row["settings"]["density"] == DENSITY for row in runs)
        assert all(row["ahead"] and row["frontload"] for row in runs)
        beside = [(row, dense[task, row["seed"]]) for row in runs]
        gained = mean(100 * (row["accuracy"] - base["accuracy"]) for row, base in beside)
        assert f"{gained:.2f}" == f"{points:.2f}"
        if task == "words":
            more = math.exp(mean(row["loss"] - base["loss"] for row, base in beside)) - 1
            assert f"{100 * more:.1f}" == f"{RECORDED[method].perplexity:.1f}"
