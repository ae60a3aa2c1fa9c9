"""``sparcel plan`` and ``sparcel density``: what to expect of sparse exchanges on a cluster.

The former tells the fastest method, or to stay dense, or to exchange rarely; the latter from how
many ranks on a sum of sparse vectors is dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sparcel.core import units
from sparcel.errors import InputError, checked_name
from sparcel.tools.cli.options import check_output, is_typed, refuse_ignored, takes_options

if TYPE_CHECKING:
    from sparcel.core.cost import Rates
    from sparcel.tools.plan import Model

_WIDTH = 100

_DEVICES = {"cpu": (10e9, 0.2e12), "gpu": (1e12, 50e12)}
"""Memory bandwidth, bytes a second, and FLOPs a second of training: those of one core, and of a GPU
of about 2020."""

_BATCH = 32
"""Samples a step on each rank, where the time to compute is not given."""

_NETWORK = ("nodes", "ranks_per_node", "bandwidth", "latency", "node_bandwidth")
"""Options that state figures of the network, which rates contain too."""


@dataclass(frozen=True)
class _Options:
    """The options of `sparcel plan`.

    Attributes
    ----------
    model
        resnet50, bert-base, gpt2, llama-3.2-1b …, see sparcel.plan.MODELS.
    parameters
        Number of parameters, instead of --model: 25.6M, 7B.
    density
        Share of the gradient that a rank sends: 0.01 is 1 %. attach has its own, and its own
        format.
    format
        How sparse methods send it: raw, packed, auto, or rounded, as packed:4.
    steps
        Length of the training, whose first steps send more.
    every
        Steps that machines train apart before an outer step.
    muon
        Plan for Muon, under which attach sends 8 bits.
    compute
        Time of a forward and a backward pass: 120ms. By default that of the model, 32 samples and
        --device.
    device
        Device that computes: gpu or cpu.
    nodes
        Number of machines.
    ranks_per_node
        GPUs, or processes, on each machine.
    bandwidth
        Rate of a machine's link: 1gbit, 25gbit, 200mbit.
    latency
        Latency of a message on this link: 100us, 40ms.
    node_bandwidth
        Rate between ranks of one machine: 80gbit, 2400gbit.
    topology
        all-reduce, or parameter-server: each machine has a link of its own to it.
    bucket
        MiB of gradients in a bucket of DDP.
    rates
        File that --save wrote, instead of stated figures.
    measure
        Measure the network: run on all ranks with torchrun, mpiexec or sparcel lab run.
    save
        File for the rates that --measure finds.
    """

    model: str = "resnet50"
    parameters: str | None = None
    density: float = 0.01
    format: str = "raw"
    steps: Annotated[int | None, typer.Option(min=1)] = None
    every: Annotated[int, typer.Option(min=1)] = 30
    muon: bool = False
    compute: str | None = None
    device: str = "gpu"
    nodes: Annotated[int, typer.Option(min=1)] = 8
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 1
    bandwidth: str = "1gbit"
    latency: str = "100us"
    node_bandwidth: str = "80gbit"
    topology: str = "all-reduce"
    bucket: Annotated[float, typer.Option(min=0.001)] = 25.0
    rates: Path | None = None
    measure: bool = False
    save: Path | None = None


@takes_options(_Options)
def plan(context: typer.Context, options: _Options) -> None:
    """Tell which method makes training on a cluster the fastest, or to stay dense.

    Predicts the time of a training step with every method, and with outer steps, before which
    machines train apart. The figures of the network are stated, were measured before, or are
    measured now. Gradients travel while the backward pass goes on.
    """
    from sparcel.tools.plan import model_of, report
    from sparcel.tools.plan.planner import plan as make

    _check(context, options)
    model = model_of(options.parameters or options.model)
    compute_s = units.seconds(options.compute) if options.compute else _compute_s(model, options)
    rates = _rates(context, options)
    if rates is None:
        return
    planned = make(
        model,
        compute_s=compute_s,
        density=options.density,
        rates=rates,
        bucket_bytes=round(options.bucket * (1 << 20)),
        topology=options.topology,
        format=options.format,
        steps=options.steps,
        every=options.every,
        muon=options.muon,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for part in report.parts(planned):
        console.print(part)


def _check(context: typer.Context, options: _Options) -> None:
    """Refuse options that would be ignored, or have no sense."""
    # --device is ignored if the time to compute is known.
    stated = (*_NETWORK, "device") if options.compute else _NETWORK
    replaced = {"measure": (*stated, "rates"), "rates": stated, "parameters": ("model",)}
    refuse_ignored(context, replaced)
    check_output(options.save)
    checked_name(options.device, _DEVICES, "device")
    if options.save is not None and not options.measure:
        raise InputError("--save writes what --measure finds; add --measure")


def _compute_s(model: Model, options: _Options) -> float:
    if not model.flops:
        raise InputError(f"the time to compute {model.name} is not known: pass --compute 120ms")
    return _BATCH * model.flops / _DEVICES[options.device][1]


def _rates(context: typer.Context, options: _Options) -> Rates | None:
    """Return the rates to plan with; None on ranks that only help to measure them."""
    from sparcel.core.cost import read_rates, stated_rates

    if options.measure:
        return _measured(options.save)
    if options.rates is not None:
        return read_rates(options.rates)
    rates = stated_rates(
        bandwidth=units.bits_per_s(options.bandwidth) / 8,
        latency_s=units.seconds(options.latency),
        ranks=options.nodes * options.ranks_per_node,
        ranks_per_node=options.ranks_per_node,
        node_bandwidth=units.bits_per_s(options.node_bandwidth) / 8,
        memory_bandwidth=_DEVICES[options.device][0],
    )
    figures = ("bandwidth", "latency") if options.nodes > 1 else ("node_bandwidth",)
    if any(is_typed(context, name) for name in figures):
        return rates
    return replace(rates, description=rates.description.replace("stated", "assumed"))


def _measured(save: Path | None) -> Rates | None:
    """Measure on all ranks; rank 0 gets the rates, and writes them."""
    from sparcel.core.comm import launched
    from sparcel.core.cost import measure
    from sparcel.tools.bench.contenders import connected

    there = launched()
    if not there:
        raise InputError(
            "--measure runs on all ranks of the cluster: start the command on each with torchrun or"
            " mpiexec, or try `sparcel lab run --nodes 8 -- sparcel plan --measure`"
        )
    with connected(there[-1:]) as engines:
        comm = engines[0].comm
        rates = measure(comm, f"{engines[0].name}")
    if comm.rank > 0:
        return None
    if save is not None:
        save.write_text(rates.to_json())
    return rates


def density(
    size: Annotated[
        int, typer.Option(min=1, help="Number of coordinates of the vector: a model's parameters.")
    ],
    density: Annotated[
        float,
        typer.Option(help="Share of the coordinates that each machine sends: 0.01 sends 1 %."),
    ] = 0.01,
    ranks: Annotated[
        int, typer.Option(min=2, help="Largest number of machines, or GPUs, in the table.")
    ] = 256,
) -> None:
    """Tell from how many machines on a sum of sparse vectors becomes dense.

    Machines (ranks) send different coordinates, so the sum has more coordinates than each of its
    parts. Shows how many, and the bytes sent as a share of a dense exchange, if the ranks choose
    independently at random. This is the worst case: the gradients of one model have many of their
    large coordinates in common.
    """
    from sparcel.core.schemes.density import checked_density, count_for
    from sparcel.tools.analysis.report import summary, table

    checked_density(density)
    k = count_for(density, size)
    console = Console(highlight=False)
    console.print(table(size, k, ranks))
    console.print(summary(size, k))
