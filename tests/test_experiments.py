"""The figures of docs/experiments.md equal the recorded ones."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "experiments.md").read_text()


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def row_of(one: Any) -> str:
    chosen, result = one["selected"], one["result"]
    cells = [
        f"`{one['method']}`",
        percent(one["accuracy"], 2),
        f"{100 * one['accuracy_lowest']:.2f} – {100 * one['accuracy_highest']:.2f}",
        f"{one['points_above_dense']:+.2f}",
        percent(one["result_density"], 2),
        "" if chosen is None else f"{chosen['over_asked']:.3f}",
        "" if chosen is None else percent(chosen["deviation_mean"], 1),
        "" if result is None else percent(result["deviation_mean"], 1),
        *("" if one[key] is None else f"{one[key]:.2f}" for key in ("xi_mean", "xi_largest")),
        f"{one['bytes_a_step'] / 1e3:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("one", recorded("training_fashion-mnist")["summary"], ids=str)
def test_page_has_the_recorded_row(one: Any) -> None:
    assert row_of(one) in PAGE.splitlines()


def test_page_has_the_recorded_run_without_warmup() -> None:
    for one in recorded("training_fashion-mnist_no_warmup")["summary"]:
        chosen = one["selected"]
        cells = [
            f"`{one['method']}`",
            percent(one["accuracy"], 2),
            f"{one['points_above_dense']:+.2f}",
            "" if chosen is None else f"{chosen['over_asked']:.3f}",
        ]
        assert f"| {' | '.join(cells)} |" in PAGE.splitlines()


def test_every_scheme_ends_within_a_point_of_dense() -> None:
    document = recorded("training_fashion-mnist")
    assert {row["seed"] for row in document["rows"]} == {0, 1, 2}
    assert document["plan"]["density"] == 0.01 and document["plan"]["ranks"] == 8
    for one in document["summary"]:
        assert one["seeds"] == 3
        assert one["points_above_dense"] > -1


def test_exact_selection_is_exact() -> None:
    summary = recorded("training_fashion-mnist")["summary"]
    exact = {one["method"]: one for one in summary if one["method"] in ("gtopk", "oktopk")}
    for one in exact.values():
        assert one["selected"]["deviation_largest"] == one["result"]["deviation_largest"] == 0


def test_page_has_the_tables_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("convergence_report")
    suite = recorded("convergence")["rows"]
    lines = list(report.causes_table(recorded("causes")["rows"]))
    for task in {row["task"] for row in suite if row["method"] != "dense"}:
        lines += report.suite_table(suite, task)
    assert set(lines) <= set(PAGE.splitlines())
