"""The example loops train on two processes, and both end with the same weights."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def printed_by(name: str, *arguments: str) -> str:
    """Run an example with these arguments, and return what its ranks print."""
    example = ROOT / "examples" / f"{name}.py"
    (launch,) = re.findall(r"^torchrun (.*\.py)", example.read_text(), re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch.split(), *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def outcomes(name: str, *arguments: str) -> list[tuple[str, str, str]]:
    """Run an example with these arguments; return each rank's accuracy, weights and bytes sent."""
    printed = re.findall(
        r"accuracy (\S+), weights (\S+), (\d+) bytes sent", printed_by(name, *arguments)
    )
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


@pytest.mark.slow
@pytest.mark.processes
def test_images_grow(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not part of the install")
    noise = np.random.default_rng(0)
    for split, count in (("train", 64), ("test", 32)):
        names = []
        for number in range(count):
            pixels = noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            pixels[:, :, number % 2] //= 4  # what tells the classes apart
            names.append(f"{number % 2}/{number}.jpg")
            file = tmp_path / split / names[-1]
            file.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels).save(file)
        (tmp_path / split / "files.txt").write_text("\n".join(names))
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        told = printed_by("growing_images", place, "--cache", str(tmp_path / "cache"), "--batch=8")
        server.shutdown()
    found = re.findall(r"epoch \d+, (\d+) px: accuracy (\S+)%", told)
    assert [int(size) for size, _ in found] == [12] * 13 + [16] * 11 + [28] * 3 + [32]
    assert float(found[-1][1]) > 90
    assert "from_source=64" in told  # each image is read once
