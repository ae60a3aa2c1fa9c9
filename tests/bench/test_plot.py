"""Plots of results."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparcel.core import units
from sparcel.errors import InputError
from sparcel.tools.bench import plot as drawn
from sparcel.tools.bench.plot import plot
from sparcel.tools.bench.results import Cell, Results, summarized
from sparcel.tools.bench.timing import PHASES
from sparcel.tools.cli import app

pytest.importorskip("matplotlib")


def _cell(algorithm: str, engine: str, density: float, seconds: float) -> Cell:
    dense = algorithm.startswith("dense")
    return Cell(
        engine=engine,
        algorithm=algorithm,
        size=1 << 20,
        density=1.0 if dense else density,
        k=1000,
        distribution="any" if dense else "uniform",
        dtype="float32",
        seconds=summarized([seconds, 2 * seconds, 3 * seconds]),
        phases=dict.fromkeys(PHASES, seconds / 10),
        bytes=8000,
        wire_share=None,
        speedup=None,
        wrong=0,
    )


def _save(path: Path, ranks: int, densities: tuple[float, ...]) -> None:
    network = {
        "description": "two cans and a string",
        "nodes": ranks,
        "ranks_per_node": 1,
        "rate_bits_per_s": None,
    }
    results = Results("sparcel bench", network, ranks)
    for engine in ("gloo", "mpi"):
        results.cells.append(_cell("dense fp32", engine, 1.0, 0.1))
        for density in densities:
            results.cells += [
                _cell(name, engine, density, density) for name in ("oktopk", "step:oktopk")
            ]
    results.save(path)


def test_plots_show_each_varied_quantity_and_the_phases(tmp_path: Path) -> None:
    _save(tmp_path / "2.json", 2, (0.01, 0.001))
    _save(tmp_path / "4.json", 4, (0.01,))
    files = [str(tmp_path / name) for name in ("2.json", "4.json")]
    done = CliRunner().invoke(app, ["bench", "plot", *files, "--out", str(tmp_path / "plots")])
    assert done.exit_code == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {
        "density_1048576_uniform_2ranks.png",
        "ranks_1048576_1pct_uniform.png",
        "breakdown_1048576_1pct_uniform_2ranks.png",
        "breakdown_1048576_0.1pct_uniform_2ranks.png",
        "breakdown_1048576_1pct_uniform_4ranks.png",
    }
    assert all(name in done.output for name in drawn)
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_plots_of_two_networks_go_to_different_files(tmp_path: Path) -> None:
    one = Results("", {"description": "a string"}, 2, cells=[_cell("ring", "gloo", 0.1, 1.0)])
    other = Results("", {"description": "a wire"}, 2, cells=[_cell("ring", "gloo", 0.1, 1.0)])
    assert len(set(plot([one, other], tmp_path))) == 2


def test_plotting_no_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no cells"):
        plot([], tmp_path)


def test_saved_results_load_unchanged(tmp_path: Path) -> None:
    _save(tmp_path / "a.json", 3, (0.5,))
    loaded = Results.load(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert loaded.cells[1].median == 1.0


@pytest.mark.parametrize("content", ["", "{}", '{"cells": [{"engine": "gloo"}]}', "[]"])
def test_files_without_results_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match="holds no results of `sparcel bench`"):
        Results.load(tmp_path / "x.json")


def test_half_the_values_are_below_the_median() -> None:
    assert summarized([3.0, 1.0, 2.0])["median"] == 2.0
    assert summarized([5.0])["p95"] == 5.0
    assert summarized(list(map(float, range(101))))["p95"] == 95.0


@given(st.integers(1, 1000), st.sampled_from([1, 1 << 10, 1 << 20]))
def test_sizes_are_written_as_the_command_line_takes_them(number: int, scale: int) -> None:
    assert units.whole(drawn._tick(number * scale)) == number * scale
