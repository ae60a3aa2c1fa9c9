"""``sparcel lab``: runs programs on an emulated cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from sparcel.core import units
from sparcel.errors import InputError
from sparcel.tools.lab import (
    EmulatedNetwork,
    Faults,
    LabUnavailableError,
    Link,
    Network,
    open_network,
    parse_link,
    run,
)

lab = typer.Typer(no_args_is_help=True)


@lab.callback()  # without a callback, typer makes the only command `sparcel lab` itself
def _lab() -> None:
    """Emulate a cluster on this computer."""


@lab.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The program and its arguments, as for torchrun or mpiexec.", show_default=False
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, max=250, help="Number of machines to emulate.")] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of each machine's link: 100mbit, 1gbit, 2.5gbit; 110mbit/500mbit for what "
            "leaves the machine and what reaches it; or none for loopback without a limit."
        ),
    ] = "1gbit",
    delay: Annotated[
        str | None,
        typer.Option(help="Time that a packet takes from a machine to another: 50ms. A ping: 2x."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Share of the packets that are lost on the way: 0.1%.")
    ] = None,
    or_loopback: Annotated[
        bool,
        typer.Option(
            "--or-loopback",
            help="Where this system can emulate no network, say so and run on loopback.",
        ),
    ] = False,
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="Number of processes on each machine.")
    ] = 1,
    mpi: Annotated[
        bool, typer.Option("--mpi", help="Make the processes MPI ranks too (MPICH).")
    ] = False,
    kill_node: Annotated[
        int | None, typer.Option(help="Kill all processes of this machine, counted from 0.")
    ] = None,
    cut_link: Annotated[
        int | None, typer.Option(help="Drop all packets on this machine's link, counted from 0.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Time from the start to the fault: 5s, 500ms.")
    ] = None,
) -> None:
    """Run a program on a cluster that is emulated on this computer.

    Rank r runs on machine r // RANKS_PER_NODE, with the environment that torchrun sets. Every line
    that it prints is shown after its rank. The exit status is that of the rank that failed first.
    A run leaves no processes or networks behind. For example:

        sparcel lab run --nodes 8 --rate 1gbit -- python train.py --epochs 3
    """
    faults = Faults(kill_node, cut_link, units.seconds(after or "0s"))
    if after is not None and not faults.any:
        raise InputError(f"--after {after} needs a fault: add --kill-node or --cut-link")
    faults.check(nodes)
    if rate == "none" and (delay or loss):
        raise InputError("--rate none has no links to delay packets or lose them: give a rate")
    link = None if rate == "none" else parse_link(rate, delay or "0s", loss or "0%")
    with _network(nodes, link, or_loopback) as network:
        if network.link != link:
            typer.echo(f"sparcel: {network.description}", err=True)
        status = run(network, command, ranks_per_node, mpi, faults)
    raise typer.Exit(status)


def _network(nodes: int, link: Link | None, or_loopback: bool) -> Network:
    if link is None or or_loopback:
        return open_network(nodes, link)
    try:
        return EmulatedNetwork(nodes, link)
    except LabUnavailableError as error:
        raise LabUnavailableError(
            f"cannot emulate a cluster: {error}; the lab needs Linux, and root or user namespaces"
        ) from error
