"""The examples of docs/data.md run as printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
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
