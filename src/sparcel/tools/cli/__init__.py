"""The ``sparcel`` command, with a file or a folder for each subcommand (`density`: cli.plan)."""

from __future__ import annotations

import sys
from typing import Annotated

from sparcel import __version__
from sparcel.errors import CommunicationError, InputError, SparcelError
from sparcel.tools.lab import WorkerFailedError, told_by_survivor

try:
    import typer

    from sparcel.tools.cli.bench import bench
    from sparcel.tools.cli.delta import delta
    from sparcel.tools.cli.lab import lab
    from sparcel.tools.cli.linear import linear
    from sparcel.tools.cli.meet import meet
    from sparcel.tools.cli.plan import density, plan
except ModuleNotFoundError as missing:
    sys.exit(f"the sparcel command needs {missing.name}: pip install 'sparcel[cli]'")

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.command()(density)
app.command()(meet)
app.command()(plan)
app.add_typer(bench, name="bench")
app.add_typer(delta, name="delta")
app.add_typer(lab, name="lab")
app.add_typer(linear, name="linear")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sparcel {__version__}")
        raise typer.Exit


@app.callback()
def _sparcel(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Sparse collectives for data-parallel training."""


def run(speaks: bool = True) -> None:
    """Run the command line; exit with the message and status 1 on an error of sparcel's own.

    Errors of input are the same on all ranks of a launched command; only one rank ``speaks``.
    """
    try:
        app()
    except WorkerFailedError as error:
        sys.exit(f"{error.output}\nsparcel: {error}")
    except InputError as error:
        sys.exit(f"sparcel: {error}" if speaks else 1)
    except CommunicationError as error:
        sys.exit(told_by_survivor(error))
    except (SparcelError, OSError) as error:
        sys.exit(f"sparcel: {error}")
