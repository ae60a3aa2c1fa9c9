"""``sparcel lab``: runs programs on an emulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from sparcel.core import units
from sparcel.errors import InputError
from sparcel.tools.cli.options import takes_options
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


@dataclass(frozen=True)
class _Options:
    """The options of `sparcel lab run`.

    Attributes
    ----------
    nodes
        Number of machines to emulate.
    rate
        Rate of each machine's link: 100mbit, 1gbit, 2.5gbit; 110mbit/500mbit for what leaves the
        machine and what reaches it; or none for loopback without a limit.
    delay
        Time that a packet takes from a machine to another: 50ms. A ping: 2x.
    loss
        Share of the packets that are lost on the way: 0.1%.
    or_loopback
        Where this system can emulate no network, say so and run on loopback.
    ranks_per_node
        Number of processes on each machine.
    mpi
        Make the processes MPI ranks too (MPICH).
    kill_node
        Kill all processes of this machine, counted from 0.
    cut_link
        Drop all packets on this machine's link, counted from 0.
    after
        Time from the start to the fault: 5s, 500ms.
    """

    nodes: Annotated[int, typer.Option(min=1, max=250)] = 4
    rate: str = "1gbit"
    delay: str | None = None
    loss: str | None = None
    or_loopback: bool = False
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 1
    mpi: bool = False
    kill_node: int | None = None
    cut_link: int | None = None
    after: str | None = None


@lab.command("run", context_settings={"allow_interspersed_args": False})
@takes_options(_Options)
def run_command(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The program and its arguments, as for torchrun or mpiexec.", show_default=False
        ),
    ],
    options: _Options,
) -> None:
    """Run a program on a cluster that is emulated on this computer.

    Rank r runs on machine r // RANKS_PER_NODE, with the environment that torchrun sets. Every line
    that it prints is shown after its rank. The exit status is that of the rank that failed first.
    A run leaves no processes or networks behind. For example:

        sparcel lab run --nodes 8 --rate 1gbit -- python train.py --epochs 3
    """
    faults = Faults(options.kill_node, options.cut_link, units.seconds(options.after or "0s"))
    if options.after is not None and not faults.any:
        raise InputError(f"--after {options.after} needs a fault: add --kill-node or --cut-link")
    faults.check(options.nodes)
    link = None
    if options.rate != "none":
        link = parse_link(options.rate, options.delay or "0s", options.loss or "0%")
    elif options.delay or options.loss:
        raise InputError("--rate none has no links to delay packets or lose them: give a rate")
    with _network(options.nodes, link, options.or_loopback) as network:
        if network.link != link:
            typer.echo(f"sparcel: {network.description}", err=True)
        status = run(network, command, options.ranks_per_node, options.mpi, faults)
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
