"""The tables of docs/commlib.md are those of its record."""

import importlib
from typing import Any

import pytest

from tests.test_experiments import ROOT


def test_the_page_has_the_tables_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("commlib_report")
    text = report.PAGE.read_text()
    assert report.page(text, report.recorded()) == text
