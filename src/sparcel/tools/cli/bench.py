"""``sparcel bench``: compares every algorithm with dense all-reduce, and plots the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparcel.tools.bench.settings import BenchSettings
from sparcel.tools.cli.options import check_output, refuse_ignored, takes_options

bench = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench.callback()
@takes_options(BenchSettings)
def bench_command(context: typer.Context, options: BenchSettings) -> None:
    """Measure the time for summing sparse vectors, and compare it with dense all-reduce.

    Times every algorithm on your machines and engines, checks the results in every round, and shows
    the time by phase and the bytes sent. Without a launcher it starts processes on this machine.
    Under torchrun, mpiexec or `sparcel lab run` every process runs this command.
    """
    if context.invoked_subcommand is not None:
        return
    from sparcel.core.comm import launched
    from sparcel.tools.bench.results import console
    from sparcel.tools.bench.run import read_files, run, start

    refuse_ignored(context, {"gradients": ["sizes"]})
    check_output(options.json)
    if launched():
        run(options, console())
    else:
        read_files(options)  # here once, instead of on every rank
        start(options.ranks, console(), mpi="mpi" in options.on)


@bench.command("plot")
def plot_results(
    files: Annotated[
        list[Path], typer.Argument(help="Files that --json wrote in one or more runs.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("plots"),
) -> None:
    """Draw PNGs of the time against density, ranks and size, and of the time by phase."""
    from sparcel.tools.bench.plot import plot
    from sparcel.tools.bench.results import Results

    for path in plot([Results.load(file) for file in files], out):
        typer.echo(path)
