"""``sparcel meet``: serves the place where islands meet that come and go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from sparcel.products.meeting import PORT, Server

_SHOWN_SECONDS, _SILENT = 2.0, 60.0
"""How often islands are shown, and after how many seconds without a sign one counts as gone."""


def meet(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: any.")] = PORT,
    state: Annotated[
        Path | None, typer.Option(help="Folder that keeps what islands have decided.")
    ] = None,
) -> None:
    """Serve the place where islands of sparcel.outer meet, until it is interrupted.

    It carries no parameters, only who takes part in a step. Started again with the same port, it
    goes on from what it has kept; islands wait for it. Whoever reaches the port can take part:
    keep it inside a private network. For example, on a machine that all islands reach:

        sparcel meet --port 29400
    """
    server = Server(port, state)
    typer.echo(f"islands meet at tcp://HOST:{server.port}; HOST is a name of this machine")
    console = Console()
    if not console.is_terminal:
        known = set[tuple[str, str]]()
        while True:
            known = told(server.folder, known)
            time.sleep(_SHOWN_SECONDS)
    with Live(console=console, transient=True) as live:
        while True:
            live.update(_table(server.folder))
            time.sleep(_SHOWN_SECONDS)


def told(folder: Path, known: Set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Print a line for each island that has come or gone; return those that are there."""
    there = {(run, island) for run, island, _, _, ago in _beats(folder) if ago < _SILENT}
    for run, island in sorted(there ^ known):
        what = "has come" if (run, island) in there else "has gone, or is silent"
        typer.echo(f"{run}: island {island} {what}")
    return there


def _table(folder: Path) -> Table:
    table = Table("run", "island", "outer steps", "seconds a step", "last seen")
    for run, island, steps, seconds, ago in _beats(folder):
        table.add_row(run, island, f"{steps}", f"{seconds:.3g}", f"{ago:.0f} s ago")
    return table


def _beats(folder: Path) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield what islands have told of themselves last, and how many seconds ago."""
    for path in sorted(folder.glob("run-*/run-beat.*")):
        with suppress(OSError, ValueError):
            told, ago = json.loads(path.read_text()), time.time() - path.stat().st_mtime
            run, island = path.parent.name.removeprefix("run-"), path.name.rpartition(".")[2]
            yield run, island, int(told["steps"]), float(told["seconds"]), ago
