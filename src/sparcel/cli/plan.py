"""``sparcel plan``: which method is the fastest on a cluster, and whether to stay dense."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sparcel import units
from sparcel.cli.options import check_folder, refuse_ignored
from sparcel.errors import InputError

if TYPE_CHECKING:
    from sparcel.cost import Rates
    from sparcel.plan import Model

plan = typer.Typer(invoke_without_command=True, rich_markup_mode=None)

_WIDTH = 100

_DEVICES = {"cpu": (10e9, 0.2e12), "gpu": (1e12, 50e12)}
"""Memory bandwidth, bytes a second, and FLOPs a second of training, of what is there if no one
says otherwise: one core, and a GPU of about 2020."""

_NETWORK = ("nodes", "ranks_per_node", "bandwidth", "latency", "node_bandwidth", "node_latency")
"""Options that state what rates know."""


@plan.callback()
def answer(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="resnet50, bert-base, gpt2, llama-7b …, see sparcel.plan.MODELS.")
    ] = "resnet50",
    parameters: Annotated[
        str | None, typer.Option(help="How many parameters instead, such as 25.6M or 7B.")
    ] = None,
    density: Annotated[
        float, typer.Option(help="The share of the gradient that a rank sends: 0.01 is 1 %.")
    ] = 0.01,
    compute: Annotated[
        str | None, typer.Option(help="How long a forward and a backward pass take: 120ms.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples a step on each rank, where --compute is not given.")
    ] = 32,
    flops: Annotated[
        str | None, typer.Option(help="Of both passes over a sample, such as 25G, instead.")
    ] = None,
    device: Annotated[str, typer.Option(help="What computes: gpu or cpu.")] = "gpu",
    device_flops: Annotated[
        str | None, typer.Option(help="FLOPs a second that it reaches in training, such as 50T.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many machines there are.")] = 8,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="GPUs, or processes, on each.")] = 1,
    bandwidth: Annotated[
        str, typer.Option(help="Of a machine's link: 1gbit, 25gbit, 200mbit.")
    ] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of a message on it: 100us, 40ms.")] = "100us",
    node_bandwidth: Annotated[
        str, typer.Option(help="Between ranks of one machine: 80gbit, 2400gbit.")
    ] = "80gbit",
    node_latency: Annotated[str, typer.Option(help="Of a message there.")] = "10us",
    topology: Annotated[
        str, typer.Option(help="all-reduce, or parameter-server: all send to one.")
    ] = "all-reduce",
    bucket: Annotated[
        float, typer.Option(min=0.001, help="MiB of gradients that travel together, as DDP's are.")
    ] = 25.0,
    rates: Annotated[
        Path | None,
        typer.Option(exists=True, help="What --measure saved, in place of these figures."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure them: under torchrun, mpiexec or sparcel lab run, on all ranks.",
        ),
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Where to write what was measured.")] = None,
) -> None:
    """Tell which method makes training the fastest on a cluster, or to stay dense.

    Predicts a step with every method from the network's figures: stated, measured before, or
    measured now, and what that means for a model whose gradients travel while the backward pass
    goes on.
    """
    if context.invoked_subcommand is not None:
        return
    from sparcel.cost import read_rates, stated_rates
    from sparcel.plan import model_of
    from sparcel.plan.planner import plan as make

    _refuse_ignored(context, computes_known=bool(compute or device_flops))
    check_folder(save)
    if device not in _DEVICES:
        raise InputError(f"device must be one of {', '.join(_DEVICES)}, got {device!r}")
    if save is not None and not measure:
        raise InputError("--save writes what --measure finds; add --measure")
    memory_bandwidth, sustained = _DEVICES[device]
    trained = model_of(parameters or model)
    each = units.count(flops) if flops else trained.flops
    speed = units.count(device_flops) if device_flops else sustained
    compute_s = units.seconds(compute) if compute else _compute_s(trained, batch, each, speed)
    if measure:
        found = _measured(save)
        if found is None:
            return
    elif rates is not None:
        found = read_rates(rates)
    else:
        found = stated_rates(
            bandwidth=units.bits_per_s(bandwidth) / 8,
            latency_s=units.seconds(latency),
            ranks=nodes * ranks_per_node,
            ranks_per_node=ranks_per_node,
            node_bandwidth=units.bits_per_s(node_bandwidth) / 8,
            node_latency_s=units.seconds(node_latency),
            memory_bandwidth=memory_bandwidth,
        )
    made = make(
        trained,
        compute_s=compute_s,
        density=density,
        rates=found,
        bucket_bytes=round(bucket * (1 << 20)),
        topology=topology,
    )
    _show(made)


def _refuse_ignored(context: typer.Context, computes_known: bool) -> None:
    """Refuse what would not be looked at; a device, where it says neither of its two figures."""
    stated = (*_NETWORK, "device") if computes_known else _NETWORK
    refuse_ignored(
        context,
        {
            "measure": (*stated, "rates"),
            "rates": stated,
            "compute": ("batch", "flops", "device_flops"),
            "parameters": ("model",),
        },
    )


def _show(made: object) -> None:
    from sparcel.plan import report
    from sparcel.plan.planner import Plan

    assert isinstance(made, Plan), "the planner makes plans"
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(report.assumptions(made), "", report.table(made), "", sep="\n")
    console.print(report.verdict(made), "", report.LEGEND, sep="\n")


@plan.command("appendix-f")
def appendix_f(
    out: Annotated[Path, typer.Option(help="The folder to draw into.")] = Path("."),
) -> None:
    """Draw figures A8 and A9 of ScaleCom's appendix F, from the paper's own inputs."""
    from sparcel.plan.appendix_f import compare, draw

    out.mkdir(parents=True, exist_ok=True)
    Console(highlight=False).print(compare())
    for path in draw(out):
        typer.echo(path)


def _measured(save: Path | None) -> Rates | None:
    """Measure on all ranks; rank 0 gets the rates, and writes them."""
    from sparcel.bench.engines import connected, launched
    from sparcel.cost import measure

    there = launched()
    if not there:
        raise InputError(
            "--measure needs the cluster's ranks: start the command on each with torchrun or"
            " mpiexec, or try `sparcel lab run --nodes 8 -- sparcel plan --measure`"
        )
    with connected(there[-1:]) as engines:
        comm = engines[0].comm
        rates = measure(comm, f"{engines[0].name}")
        first = comm.rank == 0
    if first and save is not None:
        save.write_text(rates.to_json())
    return rates if first else None


def _compute_s(model: Model, batch: int, flops: float, speed: float) -> float:
    if not flops:
        raise InputError(
            f"how long does {model.name} compute? Pass --compute 120ms, or --flops 25G a sample"
        )
    return batch * flops / speed
