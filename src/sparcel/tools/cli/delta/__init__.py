"""``sparcel delta``: what changes between versions of a model's weights, in files and in stores."""

from __future__ import annotations

import typer

from sparcel.tools.cli.delta.apply import apply
from sparcel.tools.cli.delta.diff import diff
from sparcel.tools.cli.delta.log import log, watch
from sparcel.tools.cli.delta.verify import verify

delta = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for command in (diff, apply, log, verify, watch):
    delta.command()(command)


@delta.callback()
def _delta() -> None:
    """Tell what changes between versions of a model's weights, apply it, and follow a store of it.

    A delta holds the elements that changed from one version to the next, without loss. A store is
    the folder, or the URL, to which a training publishes its versions: whole models now and then,
    and deltas in between.
    """
