"""``sparcel bench``: every algorithm beside dense all-reduce, and plots of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparcel import units
from sparcel.cli.options import check_folder, items, refuse_ignored
from sparcel.errors import InputError

bench = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench.callback()
def bench_command(
    context: typer.Context,
    sizes: Annotated[
        str,
        typer.Option(
            help="How many coordinates the vectors have: 1000, 25.6M (powers of 1000), 16Mi (of "
            "1024)."
        ),
    ] = "1Mi",
    densities: Annotated[
        str, typer.Option(help="Shares of them that each rank sends: 0.01 sends 1 %.")
    ] = "0.01,0.001",
    distributions: Annotated[
        str | None,
        typer.Option(
            help="Where these lie: uniform, clustered (in a few windows), identical on all ranks, "
            "or file: the largest of --gradients. Without it file, where these are given, or "
            "uniform."
        ),
    ] = None,
    algorithms: Annotated[
        str, typer.Option(help="Which to measure, separated by commas, or all.")
    ] = "all",
    engines: Annotated[
        str,
        typer.Option(help="gloo, mpi or both; without it, what the processes were started for."),
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
            exists=True,
            help="Real gradients, in place of --sizes: a .npy, .npz or .pt file of one vector, or "
            "of one a rank.",
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option(min=1, help="How often each is timed in a round.")
    ] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="How often it runs before that.")] = 2,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="How often to go through all rows, so that what disturbs the machine for a while "
            "disturbs all of them alike.",
        ),
    ] = 1,
    ranks: Annotated[
        int, typer.Option(min=1, help="How many processes to start, where no launcher did.")
    ] = 4,
    rate: Annotated[
        str | None,
        typer.Option(help="How fast a machine's link is, such as 10gbit; the lab tells by itself."),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Show what the cost model predicts beside: from what `sparcel plan` measured, a "
            "file or one for each engine, gloo=FILE,mpi=FILE; or measured now.",
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
) -> None:
    """Measure what it takes to add up sparse vectors, beside dense all-reduce.

    Times every algorithm on the machines and the engine at hand, checks what each returns before
    and at the end of every round, and tells where the time went and what was sent. Runs alone, on
    processes of this machine, and under torchrun, mpiexec or `sparcel lab run`: then each process
    calls it.
    """
    if context.invoked_subcommand is not None:
        return
    from sparcel.bench import report
    from sparcel.bench.contenders import names
    from sparcel.bench.engines import launched
    from sparcel.bench.launch import start
    from sparcel.bench.run import run
    from sparcel.bench.settings import BenchSettings

    refuse_ignored(context, {"gradients": ["sizes"]})
    check_folder(json)
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
        rates=dict(_rates_source(item) for item in items(rates)),
        rate_bits_per_s=None if rate is None else units.bits_per_s(rate),
        json=None if json is None else str(json.resolve()),
        command=shlex.join(["sparcel", *sys.argv[1:]]),
    )
    names(algorithms, whole_step, ranks_per_node=2)  # refuses now what would fail on every rank
    if launched():
        run(settings, report.console())
    else:
        start(settings, ranks, report.console())


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"a density is a share such as 0.01, got {text!r}") from None


def _rates_source(item: str) -> tuple[str, str]:
    """Return the engine, if one is named, and where its rates come from."""
    from sparcel.bench.engines import ENGINES
    from sparcel.bench.predicted import NOW

    engine, equals, source = item.partition("=")
    if not equals or engine not in ENGINES:  # a path may have that sign, too
        engine, source = "", item
    if source == NOW:
        return engine, source
    if not Path(source).is_file():
        raise InputError(f"can't read rates: there is no file {source}")
    return engine, str(Path(source).resolve())


@bench.command("plot")
def plot_results(
    files: Annotated[
        list[Path], typer.Argument(exists=True, help="What --json wrote, of one or more runs.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for the plots.")] = Path("plots"),
) -> None:
    """Draw time against density, ranks and size, and where the time goes, as PNGs."""
    from sparcel.bench.plot import plot
    from sparcel.bench.results import Results

    for path in plot([Results.load(file) for file in files], out):
        typer.echo(path)
