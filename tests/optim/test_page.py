"""The examples of docs/optimizers.md run as printed."""

import re
from pathlib import Path
from typing import Any

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
