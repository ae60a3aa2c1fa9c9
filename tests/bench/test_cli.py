"""Tests of the command ``sparcel bench``, run as a user runs it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from typer.testing import CliRunner

from sparcel.core.collectives import ALGORITHMS
from sparcel.core.cost import SUMS, Problem, predict, stated_rates
from sparcel.core.cost.steps import engine_sum
from sparcel.core.formats import RAW
from sparcel.errors import InputError
from sparcel.tools.bench.settings import _source
from sparcel.tools.bench.timing import PHASES
from sparcel.tools.cli import app

_SIZE, _DENSITY, _K = 4096, 0.01, 41
_RATES = stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=2)
_MPIEXEC = Path(sys.executable).with_name("mpiexec")
_ENGINES = ["gloo", "mpi"] if find_spec("mpi4py") and _MPIEXEC.exists() else ["gloo"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The output of a run of all rows on two ranks, over all engines, and its JSON."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "rates.json").write_text(_RATES.to_json())
    gradients = np.random.default_rng(1).laplace(size=(2, _SIZE)).astype(np.float32)
    np.save(folder / "gradients.npy", gradients)
    launcher = [_MPIEXEC, "-n", "2"] if "mpi" in _ENGINES else []
    measured = ["--gradients", "gradients.npy", "--densities", str(_DENSITY), "--whole-step"]
    measured += ["--distributions", "identical,file", "--iterations", "2", "--rounds", "2"]
    told = ["--rate", "1gbit", "--rates", "gloo=rates.json", "--json", "results.json"]
    # Each rank has a node, so the link's rate says what it takes at least.
    set_here = {"COLUMNS": "120", "SPARCEL_LAB_RANKS_PER_NODE": "1"}
    done = subprocess.run(
        [*launcher, sys.executable, "-m", "sparcel", "bench", "--ranks", "2", *measured, *told],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"UCX_TLS": "tcp,self", **os.environ, **set_here},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout, json.loads((folder / "results.json").read_text())


def _cells(results: dict[str, Any], engine: str = "gloo") -> dict[str, Any]:
    """Return the cells of an engine by name: those of the gradients, and of dense sums."""
    return {
        cell["algorithm"]: cell
        for cell in results["cells"]
        if cell["engine"] == engine and cell["distribution"] != "identical"
    }


@pytest.mark.processes
def test_every_row_is_right_and_plausible(everything: tuple[str, dict[str, Any]]) -> None:
    output, results = everything
    cells = _cells(results)
    assert {"dense fp32", "dense bf16", "sparse_coo", "auto", "gtopk", "oktopk"} <= set(cells)
    assert set(ALGORITHMS) <= set(cells)
    assert {"step:dense", "step:topk", "step:gtopk", "step:oktopk", "step:scalecom"} <= set(cells)
    assert results["world_size"] == 2
    assert results["network"]["rate_bits_per_s"] == 10**9
    assert results["command"].startswith("sparcel bench --ranks 2 --gradients gradients.npy")
    assert {"processor", "cores", "torch"} <= set(results["machine"])
    dense = min(_cells(results, engine)["dense fp32"]["seconds"]["median"] for engine in _ENGINES)
    for cell in results["cells"]:
        seconds, name = cell["seconds"], cell["algorithm"]
        assert (cell["wrong"], cell["size"], len(seconds["all"])) == (0, _SIZE, 4), name
        assert min(seconds["all"]) <= seconds["median"] <= seconds["p95"] <= max(seconds["all"])
        assert set(cell["phases"]) == set(PHASES)
        assert cell["wire_share"] == pytest.approx(8 * cell["bytes"] / 1e9 / seconds["median"])
        assert cell["speedup"] == pytest.approx(dense / seconds["median"])
        assert name in output
    assert "fastest exchange" in output and "fastest whole step" in output


@pytest.mark.processes
def test_each_row_is_measured_on_all_engines(everything: tuple[str, dict[str, Any]]) -> None:
    found = [
        (cell["algorithm"], cell["engine"], cell["distribution"])
        for cell in everything[1]["cells"]
        if cell["algorithm"] in ("dense fp32", "dense bf16", "oktopk")
    ]
    assert found == [
        *(("dense fp32", engine, "any") for engine in _ENGINES),
        ("dense bf16", "gloo", "any"),  # MPI has no bfloat16
        *(("oktopk", engine, kind) for kind in ("identical", "file") for engine in _ENGINES),
    ]


@pytest.mark.processes
def test_bytes_are_those_of_the_formulas(everything: tuple[str, dict[str, Any]]) -> None:
    cells = _cells(everything[1])
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
    cells = _cells(results)
    dense = predict(engine_sum(4), Problem(size=_SIZE, k=_SIZE, ranks=2), _RATES)
    assert cells["dense fp32"]["predicted"] == dense.seconds
    problem = Problem(size=_SIZE, k=_K, ranks=2)
    close = pytest.approx(predict(SUMS["allgather"], problem, _RATES).seconds, rel=0.01)
    assert cells["allgather"]["predicted"] == close
    assert cells["sparse_coo"]["predicted"] is None
    assert not any(cell["predicted"] for cell in _cells(results, "mpi").values())
    assert results["rates"] == {"gloo": json.loads(_RATES.to_json())}
    assert "predictions within 25 % of the measured time" in output


def test_processes_are_started_with_mpi_if_it_is_to_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = MagicMock()
    lines = workers.return_value.__enter__.return_value.lines
    lines.return_value = [(0, "of rank 0"), (1, "of rank 1")]
    monkeypatch.setattr("sparcel.tools.bench.run.Workers", workers)
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for engines in ("gloo", "gloo,mpi"):
        options = ["bench", "--ranks", "3", "--engines", engines]
        monkeypatch.setattr("sys.argv", ["sparcel", *options])
        assert CliRunner().invoke(app, options, catch_exceptions=False).output == "of rank 0\n"
        (network, argv, _), told = workers.call_args
        assert (network.nodes, argv[1:]) == (3, ["-P", "-m", "sparcel", *options])
        assert told == {"mpi": engines == "gloo,mpi"}


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
    assert _source(str(file)) == ("", str(file))
    assert _source(f"mpi={file}") == ("mpi", str(file))
    assert _source("gloo=now") == ("gloo", "now")
    assert _source("now") == ("", "now")
