"""``sparcel bench``: compares every algorithm with dense all-reduce, and plots the results."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparcel.core import units
from sparcel.errors import InputError
from sparcel.tools.cli.options import check_output, items, refuse_ignored

bench = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench.callback()
def bench_command(
    context: typer.Context,
    sizes: Annotated[
        str,
        typer.Option(
            help="Numbers of coordinates of the vectors: 1000, 25.6M (power of 1000), 16Mi (power "
            "of 1024)."
        ),
    ] = "1Mi",
    densities: Annotated[
        str, typer.Option(help="Shares of the coordinates that each rank sends: 0.01 sends 1 %.")
    ] = "0.01,0.001",
    distributions: Annotated[
        str | None,
        typer.Option(
            help="Positions of these coordinates: uniform, clustered (in a few windows), identical "
            "(the same on all ranks), or file (the largest of --gradients). The default is file "
            "with --gradients, else uniform."
        ),
    ] = None,
    algorithms: Annotated[
        str, typer.Option(help="Algorithms to measure, separated by commas, or all.")
    ] = "all",
    format: Annotated[
        str,
        typer.Option(
            help="How sparse streams travel: raw, packed, or rounded, such as packed:4 and "
            "raw:bfloat16."
        ),
    ] = "raw",
    engines: Annotated[
        str,
        typer.Option(
            help="gloo, mpi or gloo,mpi. The default is all engines for which the processes were "
            "launched."
        ),
    ] = "",
    whole_step: Annotated[
        bool,
        typer.Option(
            "--whole-step",
            help="Measure whole training steps too: accumulate, select, exchange, update.",
        ),
    ] = False,
    gradients: Annotated[
        Path | None,
        typer.Option(
            help="File of real gradients, instead of --sizes: .npy, .npz or .pt, with one vector, "
            "or one for each rank.",
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option(min=1, help="Timed runs of each algorithm in a round.")
    ] = 20,
    warmup: Annotated[
        int, typer.Option(min=1, help="Runs of each algorithm before the timed ones.")
    ] = 2,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Repetitions of all rows, so that a passing disturbance of the machine affects "
            "all of them alike.",
        ),
    ] = 1,
    ranks: Annotated[
        int, typer.Option(min=1, help="Number of processes to start, if no launcher did.")
    ] = 4,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of a machine's link, such as 10gbit; the lab sets it by itself."),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Show the times that the cost model predicts, too. The rates come from a file of "
            "`sparcel plan --measure --save`, from one for each engine (gloo=FILE,mpi=FILE), or "
            "from a measurement (now).",
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
) -> None:
    """Measure the time for summing sparse vectors, and compare it with dense all-reduce.

    Times every algorithm on your machines and engines, checks the results in every round, and shows
    the time by phase and the bytes sent. Without a launcher it starts processes on this machine.
    Under torchrun, mpiexec or `sparcel lab run` every process runs this command.
    """
    if context.invoked_subcommand is not None:
        return
    from sparcel.core.comm import launched
    from sparcel.tools.bench.contenders import names
    from sparcel.tools.bench.results import BenchSettings, console
    from sparcel.tools.bench.run import read_files, run, start

    refuse_ignored(context, {"gradients": ["sizes"]})
    check_output(json)
    usual = "uniform" if gradients is None else "file"
    settings = BenchSettings(
        sizes=tuple(units.whole(size) for size in items(sizes)),
        densities=tuple(_share(density) for density in items(densities)),
        distributions=items(distributions or usual),
        algorithms=algorithms,
        engines=items(engines),
        iterations=iterations,
        warmup=warmup,
        rounds=rounds,
        whole_step=whole_step,
        gradients=None if gradients is None else str(gradients.resolve()),
        format=format,
        rates=dict(_rates_source(item) for item in items(rates)),
        rate_bits_per_s=None if rate is None else units.bits_per_s(rate),
        json=None if json is None else str(json.resolve()),
        command=shlex.join(["sparcel", *sys.argv[1:]]),
    )
    names(algorithms, whole_step, ranks_per_node=2)  # raise here instead of on every rank
    if launched():
        run(settings, console())
    else:
        read_files(settings)  # here once, instead of on every rank
        start(ranks, console(), mpi="mpi" in settings.engines)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"a density is a share such as 0.01, got {text!r}") from None


def _rates_source(item: str) -> tuple[str, str]:
    """Return the engine's name, empty for all engines, and the source of its rates."""
    from sparcel.tools.bench.contenders import ENGINES
    from sparcel.tools.bench.timing import NOW

    engine, equals, source = item.partition("=")
    if not equals or engine not in ENGINES:  # a path may contain "=" too
        engine, source = "", item
    if source == NOW:
        return engine, source
    if not Path(source).is_file():
        raise InputError(f"can't read rates: there is no file {source}")
    return engine, str(Path(source).resolve())


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
