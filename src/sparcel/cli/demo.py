"""``sparcel demo``: train on a slow network, dense and sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparcel.cli.options import check_folder, items
from sparcel.lab import EmulatedNetwork, Link, open_network, parse_rate


def demo(
    nodes: Annotated[int, typer.Option(min=2, max=64, help="How many machines to emulate.")] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="How fast each machine's network link is: 100mbit, 1gbit, 2.5gbit, or none for "
            "plain loopback without a limit."
        ),
    ] = "1gbit",
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="What to train on: a folder of MNIST's or Fashion-MNIST's four files, or an .npz "
            "with x_train, y_train, x_test and y_test. Without it, the handwritten digits that "
            "come with scikit-learn.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="How many training steps by each method.")] = (
        120
    ),
    seed: Annotated[
        int, typer.Option(help="Fixes the initial weights and the order of the samples.")
    ] = 0,
    schemes: Annotated[
        str, typer.Option(help="Which ways of sending less to compare, separated by commas.")
    ] = "topk,sparcml,gtopk",
    density: Annotated[
        float,
        typer.Option(
            help="The share of the gradient that each machine sends in a step: 0.01 sends 1 % and "
            "keeps the rest for later steps."
        ),
    ] = 0.01,
    json: Annotated[Path, typer.Option(help="Where to write the results.")] = Path(
        "sparcel-demo.json"
    ),
) -> None:
    """Train one model on a slow network, first as usual, then sending only a part of each gradient.

    Builds a small cluster on this computer, machines joined by emulated Ethernet, and trains the
    same model on it several times: with PyTorch's DistributedDataParallel sending whole gradients
    (in 32 and in 16 bits), then with sparcel's schemes. Shows what a training step costs by each,
    and how well the model does in the end. Takes two to three minutes; Ctrl-C ends it cleanly.
    """
    from sparcel import scheme
    from sparcel.demo.data import load
    from sparcel.demo.report import table
    from sparcel.demo.run import run, write_json
    from sparcel.demo.settings import DemoSettings

    console = Console(highlight=False)
    link = None if rate == "none" else Link(parse_rate(rate))
    names = items(schemes)
    check_folder(json)
    for name in names:
        scheme(name, density=density)  # refuses now what would fail in minutes
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
