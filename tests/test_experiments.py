"""The tables of docs/experiments.md are those of the records."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "experiments.md").read_text()


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_page_has_the_tables_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("convergence_report")
    suite = recorded("convergence")["rows"]
    lines = list(report.causes_table(recorded("causes")["rows"]))
    for task in {row["task"] for row in suite if row["method"] != "dense"}:
        lines += report.suite_table(suite, task)
    assert set(lines) <= set(PAGE.splitlines())
