"""The examples of docs/optimizers.md run as printed, and its tables are those of the records."""

import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "optimizers.md").read_text()


def test_the_examples_run_as_printed() -> None:
    variables: dict[str, Any] = {}
    for example in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(example, variables)
    weight, bias, *_ = variables["ratios"]
    assert 0 < weight < 1 == bias
    data = variables["data"]
    error = variables["model"](data).detach() - data.sum(1, keepdim=True)
    assert error.square().mean() < 15  # it began at about 20
    assert variables["rows"].tolist() == [999_999, 1, 0]


def test_the_page_has_the_tables_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    norms: Any = importlib.import_module("norms")
    assert set(norms.all_tables()) <= set(PAGE.splitlines())


def test_the_models_of_the_benchmark_have_the_sizes_that_the_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    norms: Any = importlib.import_module("norms")
    shapes = {name: list(model()) for name, model in norms.MODELS.items()}
    sizes = {name: sum(map(math.prod, of)) for name, of in shapes.items()}
    assert (len(shapes["ResNet-50"]), sizes["ResNet-50"]) == (161, 25_557_032)
    assert f"{round(sizes['transformer'] / 1e6)} million parameters" in PAGE
    assert f"{sizes['small CNN'] // 1000} thousand" in PAGE
