"""The tables of docs/experiments.md are those of the records."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "experiments.md").read_text()


def test_page_has_the_tables_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("convergence_report")
    gtopk_paper: Any = importlib.import_module("gtopk_paper")
    signals_report: Any = importlib.import_module("signals_report")
    rows = {
        name: report.rows_of(report.RESULTS / f"{name}.json")
        for name in (
            *("causes", "convergence", "convergence_sweeps"),
            *("lab_training", "papers_recipes", "signals"),
        )
    }
    suite = rows["convergence"]
    lines = [
        *report.causes_table(rows["causes"]),
        *report.put_back_table(suite),
        *report.sweeps_table(rows["convergence_sweeps"], suite),
        *report.recipes_table(rows["papers_recipes"]),
        *report.lab_table(rows["lab_training"]),
        *report.table(gtopk_paper.COLUMNS, gtopk_paper.rows()),
        *signals_report.tables(rows["signals"]),
    ]
    for task in {row["task"] for row in suite if row["method"] != "dense"}:
        lines += report.suite_table(suite, task)
    balancing = json.loads((report.RESULTS / "balancing.json").read_text())["rows"]
    lines += [f"| {name} | {one['ms']:.1f} | {one['kb']:.0f} |" for name, one in balancing.items()]
    assert set(lines) <= set(PAGE.splitlines())


def test_scale_measures_every_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scale: Any = importlib.import_module("scale")
    for name in scale.NAMES:
        assert scale.measure(name, 4, 1000, 10)["ranks"] == 4
