"""The example loops train on two processes, and both end with the same weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def outcomes(name: str, *arguments: str) -> list[tuple[str, str, str]]:
    """Run an example with these arguments; return each rank's accuracy, weights and bytes sent."""
    example = ROOT / "examples" / f"{name}.py"
    (launch,) = re.findall(r"^torchrun (.*\.py)", example.read_text(), re.MULTILINE)
    launcher = Path(sys.executable).parent / "torchrun"
    result = subprocess.run(
        [launcher, *launch.split(), *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    printed = re.findall(r"accuracy (\S+), weights (\S+), (\d+) bytes sent", result.stdout)
    assert len(printed) == 2
    return printed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["functional_training", "local_sgd"])
def test_example_trains(name: str) -> None:
    (accuracy, weights, sent), other = outcomes(name)
    assert float(accuracy) > 0.9
    assert weights == other[1]
    assert int(sent) < 100 * 4 * (64 * 64 + 64 + 64 * 2 + 2)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("framework", "checkpoint"), [("lightning", "epoch=1-step=20.ckpt"), ("accelerate", "1")]
)
def test_example_resumes(tmp_path: Path, framework: str, checkpoint: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not part of the development install")
    name = f"{framework}_training"
    (accuracy, weights, _), other = outcomes(name, str(tmp_path))
    assert float(accuracy) > 0.9
    assert weights == other[1]
    resumed = outcomes(name, str(tmp_path / "resumed"), str(tmp_path / checkpoint))
    assert [ended for _, ended, _ in resumed] == [weights, weights]
