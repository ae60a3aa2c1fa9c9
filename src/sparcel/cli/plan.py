"""``sparcel plan``: tells the fastest method on a cluster, or to stay dense, or exchange rarely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sparcel import units
from sparcel.cli.options import check_output, is_typed, refuse_ignored
from sparcel.errors import InputError

if TYPE_CHECKING:
    from sparcel.cost import Rates
    from sparcel.plan import Model

_WIDTH = 100

_DEVICES = {"cpu": (10e9, 0.2e12), "gpu": (1e12, 50e12)}
"""Default memory bandwidth, bytes a second, and FLOPs a second of training: those of one core, and
of a GPU of about 2020."""

_NETWORK = ("nodes", "ranks_per_node", "bandwidth", "latency", "node_bandwidth", "node_latency")
"""Options that state figures of the network, which rates contain too."""


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(help="resnet50, bert-base, gpt2, llama-3.2-1b …, see sparcel.plan.MODELS."),
    ] = "resnet50",
    parameters: Annotated[
        str | None, typer.Option(help="Number of parameters, instead of --model: 25.6M, 7B.")
    ] = None,
    density: Annotated[
        float,
        typer.Option(
            help="Share of the gradient that a rank sends: 0.01 is 1 %. attach has its own, and its"
            " own format."
        ),
    ] = 0.01,
    format: Annotated[
        str,
        typer.Option(
            help="How sparse methods send it: raw, packed, auto, or rounded, as packed:4."
        ),
    ] = "raw",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the training, whose first steps send more."),
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Steps that machines train apart before an outer step.")
    ] = 30,
    muon: Annotated[
        bool, typer.Option("--muon", help="Plan for Muon, under which attach sends 8 bits.")
    ] = False,
    compute: Annotated[
        str | None, typer.Option(help="Time of a forward and a backward pass: 120ms.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples a step on each rank, if --compute is not given.")
    ] = 32,
    flops: Annotated[
        str | None, typer.Option(help="FLOPs of both passes over a sample: 25G.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device that computes: gpu or cpu.")] = "gpu",
    device_flops: Annotated[
        str | None, typer.Option(help="FLOPs a second of the device in training: 50T.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 8,
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="GPUs, or processes, on each machine.")
    ] = 1,
    bandwidth: Annotated[
        str, typer.Option(help="Rate of a machine's link: 1gbit, 25gbit, 200mbit.")
    ] = "1gbit",
    latency: Annotated[
        str, typer.Option(help="Latency of a message on this link: 100us, 40ms.")
    ] = "100us",
    node_bandwidth: Annotated[
        str, typer.Option(help="Rate between ranks of one machine: 80gbit, 2400gbit.")
    ] = "80gbit",
    node_latency: Annotated[
        str, typer.Option(help="Latency of a message inside a machine.")
    ] = "10us",
    topology: Annotated[
        str,
        typer.Option(
            help="all-reduce, or parameter-server: each machine has a link of its own to it."
        ),
    ] = "all-reduce",
    bucket: Annotated[
        float, typer.Option(min=0.001, help="MiB of gradients in a bucket of DDP.")
    ] = 25.0,
    rates: Annotated[
        Path | None,
        typer.Option(help="File that --save wrote, instead of stated figures."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the network: run on all ranks with torchrun, mpiexec or sparcel lab run.",
        ),
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="File for the rates that --measure finds.")
    ] = None,
) -> None:
    """Tell which method makes training on a cluster the fastest, or to stay dense.

    Predicts the time of a training step with every method, and with outer steps, before which
    machines train apart. The figures of the network are stated, were measured before, or are
    measured now. Gradients travel while the backward pass goes on.
    """
    from sparcel.cost import read_rates, stated_rates
    from sparcel.plan import model_of, report
    from sparcel.plan.planner import plan as make

    # --device is ignored if both of its figures are known.
    stated = (*_NETWORK, "device") if compute or device_flops else _NETWORK
    replaced = {
        "measure": (*stated, "rates"),
        "rates": stated,
        "compute": ("batch", "flops", "device_flops"),
        "parameters": ("model",),
    }
    refuse_ignored(context, replaced)
    check_output(save)
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
        figures = ("bandwidth", "latency") if nodes > 1 else ("node_bandwidth", "node_latency")
        if not any(is_typed(context, name) for name in figures):
            found = replace(found, description=found.description.replace("stated", "assumed"))
    planned = make(
        trained,
        compute_s=compute_s,
        density=density,
        rates=found,
        bucket_bytes=round(bucket * (1 << 20)),
        topology=topology,
        format=format,
        steps=steps,
        every=every,
        muon=muon,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    parts = report.assumptions(planned), report.table(planned), report.verdict(planned)
    for part in (*parts, report.not_counted(planned)):
        console.print(part, "", sep="\n")
    console.print(report.legend(planned))
    if sources := report.sources(planned):
        console.print("", sources, sep="\n")


def _measured(save: Path | None) -> Rates | None:
    """Measure on all ranks; rank 0 gets the rates, and writes them."""
    from sparcel.bench.contenders import connected
    from sparcel.comm import launched
    from sparcel.cost import measure

    there = launched()
    if not there:
        raise InputError(
            "--measure runs on all ranks of the cluster: start the command on each with torchrun or"
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
            f"the time to compute {model.name} is not known: pass --compute 120ms, or --flops 25G"
            " a sample"
        )
    return batch * flops / speed
