"""Tests of the command ``sparcel bench``, run as a user runs it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sparcel.bench.phases import PHASES
from sparcel.cli import app
from sparcel.cli.bench import _rates_source
from sparcel.collectives import ALGORITHMS
from sparcel.cost import Problem, predict, stated_rates
from sparcel.errors import InputError
from sparcel.formats import RAW
from sparcel.schemes import engine_stages

_BENCH = [sys.executable, "-m", "sparcel", "bench"]
_SIZE, _DENSITY, _K = 4096, 0.01, 41
_SMALL = ["--densities", str(_DENSITY), "--iterations", "3"]
_RATES = stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=2)
_MPIEXEC = Path(sys.executable).with_name("mpiexec")

needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or not _MPIEXEC.exists(), reason="no mpi4py, or no MPICH"
)


def _run(folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Run on 2 ranks; return the output and the JSON."""
    path = folder / "results.json"
    alone = () if launcher else ("--ranks", "2")
    done = subprocess.run(
        [*launcher, *_BENCH, *_SMALL, *alone, "--json", str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        env={"UCX_TLS": "tcp,self", **os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout, json.loads(path.read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The output of a run of all rows, and its JSON."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "rates.json").write_text(_RATES.to_json())
    rates = str(folder / "rates.json")
    return _run(folder, "--sizes", "4Ki", "--whole-step", "--rate", "1gbit", "--rates", rates)


@pytest.mark.processes
def test_every_row_is_right_and_plausible(everything: tuple[str, dict[str, Any]]) -> None:
    output, results = everything
    cells = {cell["algorithm"]: cell for cell in results["cells"]}
    assert {"dense fp32", "dense bf16", "sparse_coo", "auto", "gtopk", "oktopk"} <= set(cells)
    assert set(ALGORITHMS) <= set(cells)
    assert {"step:dense", "step:topk", "step:gtopk", "step:oktopk", "step:scalecom"} <= set(cells)
    assert results["world_size"] == 2
    assert results["network"]["rate_bits_per_s"] == 10**9
    assert results["command"].startswith("sparcel bench --densities 0.01")
    assert {"processor", "cores", "torch"} <= set(results["machine"])
    baseline = cells["dense fp32"]["seconds"]["median"]
    for name, cell in cells.items():
        assert cell["wrong"] == 0, name
        seconds = cell["seconds"]
        assert len(seconds["all"]) == 3
        assert min(seconds["all"]) <= seconds["median"] <= seconds["p95"] <= max(seconds["all"])
        assert set(cell["phases"]) == set(PHASES)
        assert cell["wire_share"] == pytest.approx(8 * cell["bytes"] / 1e9 / seconds["median"])
        assert cell["speedup"] == pytest.approx(baseline / seconds["median"])
        assert name in output
    assert "fastest exchange" in output and "fastest whole step" in output


@pytest.mark.processes
def test_bytes_are_those_of_the_formulas(everything: tuple[str, dict[str, Any]]) -> None:
    cells = {cell["algorithm"]: cell for cell in everything[1]["cells"]}
    stream = RAW.nbytes(_K, _SIZE, 4)
    expected = {
        "dense fp32": 4 * _SIZE,
        "dense bf16": 2 * _SIZE,
        "dense 2k": 8 * _K,
        "sparse_coo": 12 * _K,
        **dict.fromkeys(["allgather", "recursive_doubling", "gtopk", "step:topk"], stream),
    }
    assert {name: cells[name]["bytes"] for name in expected} == expected
    dense = cells["dense bf16"]
    assert (dense["k"], dense["density"], dense["distribution"]) == (_SIZE, 1.0, "any")
    assert (dense["dtype"], cells["allgather"]["dtype"]) == ("bfloat16", "float32")


@pytest.mark.processes
def test_predictions_are_shown_with_the_times(everything: tuple[str, dict[str, Any]]) -> None:
    output, results = everything
    cells = {cell["algorithm"]: cell for cell in results["cells"]}
    dense = predict(engine_stages(4), Problem(size=_SIZE, k=_SIZE, ranks=2), _RATES)
    assert cells["dense fp32"]["predicted"] == dense.seconds
    problem = Problem(size=_SIZE, k=_K, ranks=2)
    close = pytest.approx(
        predict(ALGORITHMS["allgather"].stages, problem, _RATES).seconds, rel=0.01
    )
    assert cells["allgather"]["predicted"] == close
    assert cells["sparse_coo"]["predicted"] is None
    assert results["rates"] == {"gloo": json.loads(_RATES.to_json())}
    assert "predictions within 25 % of the measured time" in output


@needs_mpi
@pytest.mark.processes
@pytest.mark.parametrize("launcher", [(), (str(_MPIEXEC), "-n", "2")], ids=["alone", "mpiexec"])
def test_one_run_measures_both_engines(launcher: tuple[str, ...], tmp_path: Path) -> None:
    gradients = np.random.default_rng(1).laplace(size=(2, 3000)).astype(np.float32)
    np.save(tmp_path / "gradients.npy", gradients)
    options = ["--engines", "gloo,mpi", "--algorithms", "oktopk,dense bf16"]
    options += ["--rounds", "2"]
    options += ["--gradients", str(tmp_path / "gradients.npy"), "--distributions", "file,identical"]
    _, results = _run(tmp_path, *options, launcher=launcher)
    rows = [(cell["algorithm"], cell["engine"], cell["distribution"]) for cell in results["cells"]]
    assert rows == [
        ("dense fp32", "gloo", "any"),
        ("dense fp32", "mpi", "any"),
        ("dense bf16", "gloo", "any"),  # MPI has no bfloat16
        ("oktopk", "gloo", "file"),
        ("oktopk", "mpi", "file"),
        ("oktopk", "gloo", "identical"),
        ("oktopk", "mpi", "identical"),
    ]
    assert all(len(cell["seconds"]["all"]) == 6 for cell in results["cells"])
    assert all(cell["size"] == 3000 and cell["wrong"] == 0 for cell in results["cells"])
    dense = min(cell["seconds"]["median"] for cell in results["cells"][:2])
    for cell in results["cells"]:
        assert cell["speedup"] == pytest.approx(dense / cell["seconds"]["median"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithms", "okt"], "did you mean 'oktopk'"),
        (["--sizes", "4X"], "a count is a positive number"),
        (["--sizes", "1.0005K"], "this count must be a whole number"),
        (["--densities", "1.5"], "density must lie in"),
        (["--densities", "many"], "a density is a share"),
        (["--distributions", "normal"], "distribution cannot be 'normal'"),
        (["--distributions", "file"], "needs --gradients"),
        (["--engines", "nccl"], "engine cannot be 'nccl'; it must be one of gloo, mpi"),
        (["--rate", "fast"], "a rate is a number"),
        (["--rate", "0gbit"], "at least 1 bit/s"),
        (["--json", "nowhere/x.json"], "there is no folder"),
        (["--rates", "gloo=nowhere.json"], "there is no file nowhere.json"),
        (["--rates", "runs/a=b.json"], "there is no file runs/a=b.json"),
        (["--gradients", __file__, "--sizes", "4096"], "takes the place of --sizes"),
        (["--gradients", __file__, "--distributions", "uniform"], "add file to it"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["bench", *options], catch_exceptions=False)


def test_rates_can_be_given_for_one_engine(tmp_path: Path) -> None:
    file = tmp_path / "a=b.json"
    file.touch()
    assert _rates_source(str(file)) == ("", str(file))
    assert _rates_source(f"mpi={file}") == ("mpi", str(file))
    assert _rates_source("gloo=now") == ("gloo", "now")
    assert _rates_source("now") == ("", "now")
