"""``sparcel density``: from how many ranks on a sum of sparse vectors is dense."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


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
