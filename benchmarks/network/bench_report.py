"""Figures of docs/how-to/benchmark.md, from the record of ``sparcel bench``.

python -m benchmarks.network.bench_report
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.pages import tables
from benchmarks.record import RESULTS
from sparcel.tools.bench.contenders import DENSE
from sparcel.tools.bench.plot import plot
from sparcel.tools.bench.results import Results

SHOWN = (
    *DENSE,
    *("sparse_coo", "allgather", "recursive_doubling", "split_allgather", "gtopk", "oktopk"),
    *("step:dense", "step:mstopk", "step:topk", "step:gtopk", "step:scalecom"),
)
"""Rows that the figures show, over Gloo: of all kinds, and none of code that is gone."""

CASE = "16777216_0.781pct_uniform_8ranks"


def draw_all() -> None:
    """Draw the figures."""
    results = Results.load(RESULTS / "bench_8_nodes_1gbit.json")
    results.cells = [
        cell for cell in results.cells if cell.engine == "gloo" and cell.algorithm in SHOWN
    ]
    tables.style()
    with TemporaryDirectory() as folder:
        drawn = {path.stem: path for path in plot([results], Path(folder), ".svg")}
        for name, stem in (
            ("bench_density", "density_16777216_uniform_8ranks"),
            ("bench_breakdown", f"breakdown_{CASE}"),
        ):
            (tables.FIGURES / f"{name}.svg").write_bytes(drawn[stem].read_bytes())


if __name__ == "__main__":
    draw_all()
