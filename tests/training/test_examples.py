"""The example loops train on two processes, and both end with the same weights."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from sparcel.core.comm import Communicator
from tests.integrations.launched import as_by_accelerate, as_by_torchrun

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def printed_by_rank(comm: Communicator, name: str, arguments: list[str]) -> str:
    """Run an example on a rank of the pool, whose process group there is already."""
    example = str(ROOT / "examples" / f"{name}.py")
    launched_by = as_by_accelerate if find_spec("accelerate") else as_by_torchrun
    with (
        launched_by(comm),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as printed,
    ):
        patch.setattr(sys, "argv", [example, *arguments])
        for function in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, function, lambda *_: None)
        run_path(example, run_name="__main__")
    return printed.getvalue()


def outcomes(run_on: Any, name: str, *arguments: Path) -> list[tuple[str, str, str]]:
    """Run an example with these arguments; return each rank's accuracy, weights and bytes sent."""
    told = run_on(2, printed_by_rank, name, list(map(str, arguments)))
    found = [re.findall(r"accuracy (\S+), weights (\S+), (\d+) bytes sent", one) for one in told]
    return [one for (one,) in found]


def test_example_trains(run_on: Any) -> None:
    (accuracy, weights, sent), other = outcomes(run_on, "functional_training")
    assert float(accuracy) > 0.9
    assert weights == other[1]
    assert int(sent) < 100 * 4 * (64 * 64 + 64 + 64 * 2 + 2)


@pytest.mark.parametrize(
    ("framework", "checkpoint"), [("lightning", "epoch=1-step=20.ckpt"), ("accelerate", "1")]
)
def test_example_resumes(run_on: Any, tmp_path: Path, framework: str, checkpoint: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not part of the development install")
    name = f"{framework}_training"
    (accuracy, weights, _), other = outcomes(run_on, name, tmp_path)
    assert float(accuracy) > 0.9
    assert weights == other[1]
    resumed = outcomes(run_on, name, tmp_path / "resumed", tmp_path / checkpoint)
    assert [ended for _, ended, _ in resumed] == [weights, weights]


def launched(name: str, *arguments: str) -> str:
    """Run an example by the command in its docstring, and return what its ranks print."""
    example = ROOT / "examples" / f"{name}.py"
    (launch,) = re.findall(r"^torchrun (.*\.py)", example.read_text(), re.MULTILINE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launch.split(), *arguments]
    result = subprocess.run(torchrun, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_language_model_trains_on_islands() -> None:
    pytest.importorskip("transformers", reason="transformers is not part of the install")
    ends = re.findall(
        r"(\d+) outer steps, loss (\S+), weights (\S+),", launched("outer_language_model")
    )
    (steps, loss, weights), other = ends
    assert int(steps) == 10 and float(loss) < 4.0 and weights == other[2]


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
        told = launched("growing_images", place, "--cache", str(tmp_path / "cache"), "--batch=8")
        server.shutdown()
    found = re.findall(r"epoch \d+, (\d+) px: accuracy (\S+)%", told)
    assert [int(size) for size, _ in found] == [12] * 13 + [16] * 11 + [28] * 3 + [32]
    assert float(found[-1][1]) > 90
    assert "from_source=64" in told  # each image is read once
