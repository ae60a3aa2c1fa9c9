"""``sparcel density``: how soon a sum of sparse vectors becomes dense."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def density(
    size: Annotated[
        int, typer.Option(min=1, help="How many coordinates the vector has: a model's parameters.")
    ],
    density: Annotated[
        float,
        typer.Option(help="The share of them that each machine sends: 0.01 sends 1 %."),
    ] = 0.01,
    ranks: Annotated[
        int, typer.Option(min=2, help="How many machines, or GPUs, there are at most.")
    ] = 256,
) -> None:
    """Tell how many machines it takes for a sum of sparse vectors to become dense.

    Machines (ranks) that each send a few coordinates send different ones, so the sum has more of
    them than any of its parts. Shows how many more, and what share of a dense exchange is sent, for
    ranks that choose independently and by chance: the most to expect, since the gradients of one
    model agree on what is large.
    """
    from sparcel.analysis.report import summary, table
    from sparcel.schemes.density import check_density, count_for

    check_density(density)
    k = count_for(density, size)
    console = Console(highlight=False)
    console.print(table(size, k, ranks))
    console.print(summary(size, k))
