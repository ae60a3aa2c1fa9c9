"""``sparcel demo``: trains on a slow network, dense and sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparcel.cli.options import check_output, items
from sparcel.lab import EmulatedNetwork, Link, open_network, parse_rate


def demo(
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Number of machines to emulate.")] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of each machine's network link: 100mbit, 1gbit, 2.5gbit; or none for "
            "loopback without a limit."
        ),
    ] = "1gbit",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data to train on: a folder with the four files of MNIST or Fashion-MNIST, or an "
            ".npz with x_train, y_train, x_test and y_test. The default is the handwritten digits "
            "of scikit-learn.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Training steps with each method.")] = 120,
    seed: Annotated[
        int, typer.Option(help="Fixes the initial weights and the order of the samples.")
    ] = 0,
    schemes: Annotated[
        str, typer.Option(help="Sparse methods to compare, separated by commas.")
    ] = "topk,gtopk,oktopk",
    density: Annotated[
        float,
        typer.Option(
            help="Share of the gradient that each machine sends in a step: 0.01 sends 1 % and "
            "keeps the rest for later steps."
        ),
    ] = 0.01,
    json: Annotated[Path, typer.Option(help="File for the results.")] = Path("sparcel-demo.json"),
) -> None:
    """Train one model on a slow network, first as usual, then sending only a part of each gradient.

    Emulates a small cluster on this computer, with machines joined by Ethernet, and trains the same
    model on it several times: first with PyTorch's DistributedDataParallel, which sends whole
    gradients (in 32 and in 16 bits), then with sparcel's schemes. Shows the time of a training step
    with each method, and the accuracy of the model. Takes two to three minutes; Ctrl-C ends it
    cleanly.
    """
    from sparcel import scheme
    from sparcel.demo.data import load
    from sparcel.demo.report import table
    from sparcel.demo.run import run, write_json
    from sparcel.demo.settings import DemoSettings

    console = Console(highlight=False)
    link = None if rate == "none" else Link(parse_rate(rate))
    names = items(schemes)
    check_output(json)
    for name in names:
        scheme(name, density=density)  # raise here instead of minutes later
    where = None if data is None else str(data.resolve())
    dataset = load(where)
    with open_network(nodes, link) as network:
        console.print(f"Network: {network.description}")
        console.print(f"Data: {dataset.description}")
        counts_wire = isinstance(network, EmulatedNetwork)
        settings = DemoSettings(steps, seed, density, names, where, counts_wire)
        outcome = run(network, settings, console)
    console.print(table(outcome.rows))
    write_json(json, network, dataset.name, settings, outcome)
    console.print(f"Results: {json.resolve()}", soft_wrap=True)
