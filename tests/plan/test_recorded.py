"""What a plan says of accuracy is what the record holds, of rules that have not changed since."""

import math
from statistics import mean

import pytest

from benchmarks.record import RESULTS, Row, is_todays, rows_of
from benchmarks.training.frontier_report import rows_of_run, step_factors, usual_of
from sparcel.core.schemes import ON_NODES, SEND_ALL, UNDER_MUON, Settings
from sparcel.tools.plan.planner import SPARSE
from sparcel.tools.plan.recorded import (
    LIKE,
    MUON,
    OWN,
    POWERSGD,
    RANKS,
    RECORDED,
    STEPS,
    TASKS,
    UNNAMED,
    WITH_MUON,
)


def run_of(settings: Settings) -> str:
    """Return what the record calls trainings with such settings."""
    density, format = settings["density"], settings["format"]
    if density < 1:
        return f"bidirectional,{density},{format},front"
    return f"bidirectional,1,{format}/{format.rpartition(':')[2]},still"


NAMES = {
    "hitopk": "hitopk 2×4",
    POWERSGD: "powersgd,4",
    **{name: run_of(settings) for name, settings in OWN.items()},
}
"""What the records call the methods."""


def test_every_method_that_a_plan_may_recommend_is_recorded():
    assert set(RECORDED) == {*SPARSE, *ON_NODES, *OWN, POWERSGD} - set(SEND_ALL)


@pytest.mark.parametrize("method", WITH_MUON)
def test_muon_s_losses_are_those_of_the_record(method):
    recorded, task = WITH_MUON[method], LIKE[MUON][0]
    run = run_of(UNDER_MUON) if method == UNNAMED else NAMES[method]
    rows = rows_of_run(run)
    ours, dense = (
        {row["seed"]: row for row in usual_of(rows, one, task)} for one in (run, "dense")
    )
    assert sorted(ours) == list(range(recorded.seeds))
    dates = sorted((row["date"], row["commit"]) for row in ours.values())
    assert recorded.commits == (dates[0][1], dates[-1][1])
    factors = {task: tuple(round(x, 3) for x in step_factors(rows, run, task))}
    assert factors == recorded.factors
    more = math.exp(mean(ours[seed]["loss"] - dense[seed]["loss"] for seed in ours)) - 1
    assert round(100 * more, 1) == recorded.perplexity


@pytest.mark.parametrize("method", RECORDED)
def test_losses_are_those_of_the_record_and_of_the_rule_of_today(method):
    recorded, name = RECORDED[method], NAMES.get(method, method)
    # Dense training is in one record for all; rows without a method are of torch's hooks.
    suite = [
        {"run": _name(row), **row}
        for file in ("convergence.json", "frontier.json")
        for row in rows_of(RESULTS / file)
        if _name(row) in (name, "dense") and is_todays(row)
    ]
    rows = [
        row for file in {recorded.record, "convergence.json"} for row in rows_of(RESULTS / file)
    ]
    rows = [row for row in rows if (row["steps"], row["ranks"]) == (STEPS, RANKS)]
    dense = {(row["task"], row["seed"]): row for row in rows if row.get("method") == "dense"}
    of_method = [row for row in rows if row["task"] in TASKS and _name(row) == name]
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
        density = OWN.get(method, {"density": 0.01})["density"]
        ours = [row for row in runs if "settings" in row]
        assert ours or method == POWERSGD
        assert all(row["settings"]["density"] == density for row in ours)
        assert all(density == 1 or (row["ahead"] and row["frontload"]) for row in ours)
        beside = [(row, dense[task, row["seed"]]) for row in runs]
        gained = mean(100 * (row["accuracy"] - base["accuracy"]) for row, base in beside)
        assert round(gained, 2) == points
        if task == "words":
            more = math.exp(mean(row["loss"] - base["loss"] for row, base in beside)) - 1
            assert round(100 * more, 1) == recorded.perplexity
    for task, factors in recorded.factors.items():
        assert tuple(round(one, 3) for one in step_factors(suite, name, task)) == factors
        assert len(factors) == recorded.seeds


def _name(row: Row) -> str:
    """Return what trained; rows of torch's hooks have a run and no method."""
    return row.get("method", row.get("run", ""))
