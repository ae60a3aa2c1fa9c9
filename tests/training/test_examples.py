"""The example loops train on two processes, and both end with the same weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["functional_training", "local_sgd"])
def test_example_trains(name: str) -> None:
    example = ROOT / "examples" / f"{name}.py"
    (launch,) = re.findall(r"^torchrun (.*)$", example.read_text(), re.MULTILINE)
    launcher = Path(sys.executable).parent / "torchrun"
    result = subprocess.run(
        [launcher, *launch.split()], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    printed = re.findall(r"accuracy (\S+), weights (\S+), (\d+) bytes sent", result.stdout)
    assert len(printed) == 2
    (accuracy, weights, sent), other = printed
    assert float(accuracy) > 0.9
    assert weights == other[1]
    assert int(sent) < 100 * 4 * (64 * 64 + 64 + 64 * 2 + 2)
