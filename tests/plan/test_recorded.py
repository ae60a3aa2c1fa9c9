"""What a plan says of accuracy is what the record holds, of rules that have not changed since."""

import math
from statistics import mean

import pytest

from benchmarks.record import RESULTS, rows_of
from benchmarks.rules import is_todays
from benchmarks.training.step_factors import step_factors
from sparcel.plan.planner import SPARSE
from sparcel.plan.recorded import RANKS, RECORDED, STEPS, TASKS, UNNAMED
from sparcel.schemes import DEFAULT, ON_NODES, RECOMMENDED, SEND_ALL

FRONTIER = f"{DEFAULT},{RECOMMENDED['density']},{RECOMMENDED['format']},front"
NAMES = {"hitopk": "hitopk 2×4", UNNAMED: FRONTIER}
"""What the records call the methods."""


def test_every_method_that_a_plan_may_recommend_is_recorded():
    assert set(RECORDED) == {*SPARSE, *ON_NODES, UNNAMED} - set(SEND_ALL)


@pytest.mark.parametrize("method", RECORDED)
def test_losses_are_those_of_the_record_and_of_the_rule_of_today(method):
    recorded, name = RECORDED[method], NAMES.get(method, method)
    # Dense training is in one record for all; rows without a method are of torch's hooks.
    suite = [
        {"run": row.get("method"), **row}
        for file in ("convergence.json", "frontier.json")
        for row in rows_of(RESULTS / file)
        if is_todays(row)
    ]
    rows = [
        row for file in {recorded.record, "convergence.json"} for row in rows_of(RESULTS / file)
    ]
    rows = [row for row in rows if (row["steps"], row["ranks"]) == (STEPS, RANKS)]
    dense = {(row["task"], row["seed"]): row for row in rows if row.get("method") == "dense"}
    of_method = [row for row in rows if row.get("method") == name and row["task"] in TASKS]
    every = [row for row in of_method if is_todays(row)]
    assert every, (
        f"the rule of {method} has changed since {recorded.record} was made: train again with"
        " benchmarks.training.convergence or frontier, or take it out of plan/recorded.py"
    )
    dates = sorted((row["date"], row["commit"]) for row in every)
    assert recorded.commits == (dates[0][1], dates[-1][1])
    for task, points in zip(TASKS, recorded.points, strict=True):
        runs = [row for row in every if row["task"] == task]
        assert sorted(row["seed"] for row in runs) == list(range(recorded.seeds))
        assert all(row["settings"]["density"] == recorded.density for row in runs)
        assert all(row["ahead"] and row["frontload"] for row in runs)
        beside = [(row, dense[task, row["seed"]]) for row in runs]
        gained = mean(100 * (row["accuracy"] - base["accuracy"]) for row, base in beside)
        assert round(gained, 2) == points
        if task == "words":
            factors = step_factors(suite, name, task)
            assert tuple(round(one, 3) for one in factors) == recorded.factors
            more = math.exp(mean(row["loss"] - base["loss"] for row, base in beside)) - 1
            assert round(100 * more, 1) == recorded.perplexity
