"""The examples of docs/data.md run as printed, and its tables are those of the records."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
PROSE = ("| stage |", "| what | then |")
"""How the page's tables begin that have no numbers."""
PAGE = (ROOT / "docs" / "data.md").read_text()


@pytest.mark.processes
def test_the_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / f"{number}.jpeg" for number in range(70)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    names: dict[str, Any] = {"paths": paths, "labels": range(70), "epochs": 2}
    whole, parts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(whole, names)
    images, labels = zip(*names["loader"], strict=True)
    assert torch.cat(images).shape == (70, 3, 8, 8)
    assert sorted(torch.cat(labels).tolist()) == [*range(70)]
    exec(parts, names)
    stats = names["cached"].stats()
    assert (stats.from_source, stats.in_memory) == (70, 70)


def test_the_page_has_the_tables_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("data_report")
    made = tables("\n".join(report.all_tables()))
    assert bool(made) == any(report.RESULTS.glob("data_*.json"))
    assert [table for table in tables(PAGE) if not table.startswith(PROSE)] == made


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n?)+", text + "\n", re.MULTILINE)
