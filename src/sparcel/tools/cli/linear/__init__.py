"""``sparcel linear``: linear models on sparse rows, fitted by one process or many."""

from __future__ import annotations

import typer

from sparcel.tools.cli.linear.fit import fit
from sparcel.tools.cli.linear.predict import evaluate, predict

linear = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for command in (fit, predict, evaluate):
    linear.command()(command)


@linear.callback()
def _linear() -> None:
    """Fit linear models to sparse rows, on one machine or, under torchrun or mpiexec, on many."""
